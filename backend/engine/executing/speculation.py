"""Draft tokens for a batch's sequences, except those with images, which drafters do not see."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from backend.engine.drafting.drafter import Drafter, DraftLength, DraftRequest
from backend.engine.planning.draft_width import MOST_AGAIN

if TYPE_CHECKING:
    from backend.engine.drafting.draft_loading import Drafting
    from backend.engine.executing.executor_sequence import ExecutorSequence

    # A sequence, and its known tokens that are not in `history` yet.
    Known = tuple[ExecutorSequence, Sequence[int]]

_log = logging.getLogger(__name__)


class Speculation:
    """The drafters of a batch; each sequence uses the first one that has a draft token.

    behind: how many sequences got no draft token from the latest `propose` because a drafter had
        yet to catch up with them.
    """

    def __init__(self, drafting: Drafting, end_tokens: Collection[int]) -> None:
        self._most = drafting.most
        self._end_tokens = end_tokens
        self.behind = 0
        self._drafters = [_TrackedDrafter(drafter) for drafter in drafting.new_drafters()]
        # by sequence, the record of the drafter that it uses
        self._asked: dict[int, DraftLength] = {}

    @property
    def nbytes(self) -> int:
        """Return the bytes that the drafters store between steps."""
        return sum(each.drafter.nbytes for each in self._drafters)

    def ready(self, sequences: Sequence[Known]) -> bool:
        """Return whether drafting saves time now; then read the latest tokens before `propose`.

        sequences: without those latest tokens.
        """
        return any(
            self._most_for(sequence, behind)
            and each.lengths[sequence.number].ready(len(sequence.history) + len(behind) + 1)
            for sequence, behind in sequences
            for each in self._drafters
        )

    def propose(self, known: Sequence[Known], width: int) -> list[list[int]]:
        """Return up to `width` draft tokens for each sequence, after its last known token."""
        sequences = [sequence for sequence, _ in known]
        drafts: list[list[int]] = [[] for _ in known]
        wanting = {
            at: DraftRequest(sequence.number, [*sequence.history, *behind], most, sequence.states)
            for at, (sequence, behind) in enumerate(known)
            if (most := min(width, self._most_for(sequence, behind[:-1])))
            and behind[-1] not in self._ends(sequence)
        }
        behind: set[int] = set()
        for each in list(self._drafters):
            try:
                found = each.propose(wanting)
            except Exception:
                _log.warning("a drafter failed; its requests continue without it", exc_info=True)
                self._drafters.remove(each)
                continue
            for at, own in found.items():
                if own is None:
                    behind.add(at)
                    continue
                self._asked[sequences[at].number] = each.lengths[sequences[at].number]
                ends = self._ends(sequences[at])
                # End tokens are not drafted: the sampler finds them, and nothing follows them.
                stop = next((at for at, token in enumerate(own) if token in ends), len(own))
                drafts[at] = own[:stop]
                del wanting[at]
        self.behind = len(behind & wanting.keys())
        return drafts

    def record(self, sequence: ExecutorSequence, proposed: int, accepted: int) -> None:
        """Record that the first `accepted` of a sequence's `proposed` draft tokens were right."""
        if proposed:
            self._asked[sequence.number].record(proposed, accepted)

    def leave(self, sequences: Sequence[ExecutorSequence]) -> None:
        """Drop what is stored for sequences that have left the batch."""
        gone = [sequence.number for sequence in sequences]
        for each in self._drafters:
            each.drafter.forget(gone)
            for number in gone:
                each.lengths.pop(number, None)
        for number in gone:
            self._asked.pop(number, None)

    def _ends(self, sequence: ExecutorSequence) -> Collection[int]:
        request = sequence.request
        return request.stop_tokens.union(() if request.ignore_eos else self._end_tokens)

    def _most_for(self, sequence: ExecutorSequence, again: Sequence[int]) -> int:
        """Return how many draft tokens fit into the sequence's limit and the pass.

        again: tokens to feed once more. Each wrong draft token adds to them, so their number is
            limited.
        """
        if sequence.media is not None or len(again) > MOST_AGAIN:
            return 0
        requested = sequence.request.n_draft
        most = self._most if requested is None else requested
        return max(min(most, sequence.limit - sequence.delivered - 2), 0)


class _TrackedDrafter:
    """A drafter, with the number of draft tokens that is worth checking for each sequence."""

    def __init__(self, drafter: Drafter) -> None:
        self.drafter = drafter
        self.lengths: defaultdict[int, DraftLength] = defaultdict(DraftLength)

    def propose(self, wanting: dict[int, DraftRequest]) -> dict[int, list[int] | None]:
        """Return the draft tokens of the sequences that have any, by the same keys.

        None for those that the drafter has yet to catch up with.
        """
        draft_requests = {
            at: replace(sequence, most=most)
            for at, sequence in wanting.items()
            if (most := self.lengths[sequence.sequence].begin(len(sequence.tokens), sequence.most))
        }
        if not draft_requests:
            return {}
        found = dict(
            zip(draft_requests, self.drafter.propose(list(draft_requests.values())), strict=True)
        )
        for at, drafts in found.items():
            if drafts == []:
                self.lengths[draft_requests[at].sequence].record_none()
        return {at: drafts for at, drafts in found.items() if drafts != []}
