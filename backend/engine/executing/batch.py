"""Sequences that decode together, in the same forward passes.

Steps overlap: `launch` starts the next forward pass on tokens that are still being computed, and
only then does `read` wait for those tokens, so the device works while Python delivers text. If a
sequence is constrained, `launch` reads the tokens first (`choosing`). On a CPU a launch takes as
long as the step, so the tokens of a slow model are read in the step that computes them
(`read_early`).

A step may check draft tokens (`speculation`). It then reads its tokens first, feeds each
sequence its token followed by draft tokens, and delivers the accepted draft tokens and the token
after them. Recurrent states cannot be truncated after the last accepted token, so a sequence with
such states returns to its state before the step, and the next step feeds it the accepted tokens
again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx
import numpy as np

from backend.engine.caching import kv
from backend.engine.constraints.constraint import AnswerRule, words
from backend.engine.drafting.hidden_states import (
    PassedStates,
    UnreadStates,
    distribute,
    latest,
)
from backend.engine.errors import NotFinite
from backend.engine.events import TokenLogprob
from backend.engine.executing.choosing import (
    Chooser,
    Chosen,
    Sampled,
    accept,
    combined,
    fill_mask,
    fitting,
    grammar_ended,
    masking,
    most_grammar_seconds,
    read_early,
    sampled_of,
)
from backend.engine.executing.executor_sequence import ExecutorSequence, Rows, adapted
from backend.engine.executing.speculation import Speculation
from backend.engine.model import EngineModel
from backend.engine.planning.plan import Drafted
from backend.engine.sampling.penalties import Past
from common.prefixes import common_prefix

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Checked:
    """A launched step that checks draft tokens.

    proposed: number of draft tokens per sequence.
    draft_tokens: per sequence, the draft tokens that the sequence's grammar allows.
    choices: the tokens sampled after the last token and after each draft token, for all sequences
        one after the other.
    fed: the tokens fed to each sequence; at the end the last token and the draft tokens.
    """

    chosen: Chosen
    last_tokens: Sequence[int]
    proposed: Sequence[int]
    draft_tokens: Sequence[Sequence[int]]
    choices: Chosen
    fed: Sequence[list[int]]


class DecodeBatch(Rows):
    """Sequences whose last tokens have not been fed yet, and the state of their latest step.

    ahead: the tokens that the step computes and a later step reads, [sequences]; None if there are
        none.
    drafted: what the planner learns from the step, except `longest` and `seconds`; None if it does
        not learn from the step.
    """

    def __init__(self, model: EngineModel) -> None:
        super().__init__(kv.BatchCache(), [])
        self._engine_model = model
        self._model = model.model
        self.ahead: mx.array | None = None
        self.drafted: Drafted | None = None
        # Per sequence, known tokens after its `history` that have to be fed again.
        self._again: list[list[int]] = []
        self._passed: mx.array | None = None  # the hidden states of the latest pass
        self._kept = PassedStates()
        self._chosen: Chosen | None = None
        self._chooser: Chooser | None = None
        self._left = 0  # maximum number of tokens that a sequence may still generate
        self._fed: Chosen | _Checked | None = None
        self._speculation: Speculation | None = None
        if model.drafting is not None:
            self._speculation = Speculation(model.drafting, model.end_tokens)

    @property
    def draft_bytes(self) -> int:
        """Bytes of the KV of drafters, and of hidden states not yet passed to sequences."""
        return self._kept.nbytes + (self._speculation.nbytes if self._speculation else 0)

    @property
    def chooser_bytes(self) -> int:
        """Bytes of biases, token counts and noise, which later steps need."""
        return self._chooser.nbytes if self._chooser is not None else 0

    def join(self, group: Rows, joining: Sequence[ExecutorSequence]) -> None:
        """Add sequences of a prefill whose first tokens are sampled; they leave its rows.

        Raises what MLX raises; the batch is then unchanged.
        """
        parts = [] if self._chosen is None else [self._chosen]
        parts += {
            id(sequence.first): sequence.first for sequence in joining if sequence.first is not None
        }.values()
        chosen = combined(parts)
        if not self._engine_model.together:
            self._feed_again()
        order = self.cache.absorb(
            group.cache, [group.sequences.index(sequence) for sequence in joining]
        )
        group.sequences = [sequence for sequence in group.sequences if sequence not in joining]
        self._kept.flush(self._states())
        members = [*self._known(), *((sequence, []) for sequence in joining)]
        self.sequences = [members[place][0] for place in order]
        self._again = [members[place][1] for place in order]
        self._chosen = chosen.select(self.sequences)
        self._chooser = None
        for sequence in joining:
            sequence.rows, sequence.first, sequence.media_prefill = self, None, None

    def launch(
        self, width: int | None = None, before_start: Callable[[], None] | None = None
    ) -> None:
        """Start the next forward pass, on the tokens that `read` then returns.

        width: maximum number of draft tokens after each token, for which the tokens are read before
            the pass starts; None: no draft tokens, and the planner does not learn from the step.
        before_start: called when the graph is built, before the device gets any part of it.
        """
        if self._chooser is None:
            self.settle()
        self.ahead = self.drafted = None
        if width is not None:
            self.drafted = Drafted(len(self.sequences), 0, width, 0, (), 0.0)
        if width and before_start is not None:
            before_start()
        if not (width and self._launch_checked(width)):
            self._launch(before_start)

    def read(self) -> list[Sampled]:
        """Wait for the tokens that were fed to the launched step, and for its draft tokens."""
        fed, self._fed = self._fed, None
        assert fed is not None
        if isinstance(fed, _Checked):
            return self._settle(fed)
        tokens = fed.read()
        if fed.again:
            for sequence, again in zip(self.sequences, fed.again, strict=True):
                sequence.history += again
        if not fed.fed:  # a pass would have passed the tokens on to the grammars
            for sequence, token in zip(self.sequences, tokens, strict=True):
                if not sequence.first_delivered:
                    accept(sequence, token, fed.faults)
        return _delivered(sampled_of(fed, tokens), fed=fed.fed)

    def read_early(self) -> list[Sampled]:
        """Wait for the tokens that the launched step computes; the next `read` omits them."""
        return [] if self.ahead is None or self._chosen is None else read_early(self._chosen)

    def remove_before_read(self, sequence: ExecutorSequence) -> list[Sampled]:
        """Remove a sequence whose latest token has not been read; returns that token.

        The sequence's grammar gets the token now, because the token will be prefilled with the
        others. The token of a postponed sequence is dropped.
        """
        if sequence.postponed:
            self.leave([sequence])
            return []
        assert self._chosen is not None
        tokens = self._chosen.read()
        at = self.sequences.index(sequence)
        if not sequence.first_delivered:
            accept(sequence, tokens[at], self._chosen.faults)
        sampled = sampled_of(self._chosen, tokens)[at]
        self.leave([sequence])
        return _delivered([sampled])

    def settle(self) -> None:
        """Prepare the cache for a pass."""
        if not self.cache.arranged:
            self.cache.arrange()

    def take(self, sequence: ExecutorSequence) -> kv.RowCache:
        """Return the KV of a sequence that will leave; a copy, unless the sequence is alone."""
        return self.cache.layers if len(self.sequences) == 1 else self.extract(sequence)

    def leave(self, leaving: Sequence[ExecutorSequence]) -> None:
        """Remove sequences. Their tokens that were not read are dropped."""
        known = self._known()
        self._chooser = None
        self._kept.flush(self._states())
        if self._speculation is not None:
            self._speculation.leave(leaving)
        super().leave(leaving)
        stay = set(map(id, self.sequences))
        self._again = [again for sequence, again in known if id(sequence) in stay]
        self._chosen = self._chosen.select(self.sequences) if self._chosen and stay else None

    def _launch(self, before_start: Callable[[], None] | None) -> None:
        assert self._chosen is not None
        chosen, chooser = self._chosen, self._chooser
        self._fed = chosen
        if chooser is None:
            self._left = max(sequence.limit - sequence.delivered for sequence in self.sequences)
        if self._left <= 1:
            return  # every sequence ends with its last token, so no forward pass is needed
        self._left -= 1
        chosen.fed = True
        if chooser is None:
            pasts = [_past(sequence, again) for sequence, again in self._known()]
            chooser = self._chooser = Chooser(self.sequences, pasts, self._engine_model)
            if any(self._again):
                chosen.again = self._again
        if chosen.again:
            logits = self._run_again(chosen.tokens)
        else:
            tokens = mx.expand_dims(chosen.tokens, 1)
            logits = mx.squeeze(self._run(tokens, self.cache.layers), 1)
        if before_start is not None:
            before_start()
        if chosen.again:
            self._remember([(len(own), len(own) + 1) for own in chosen.again])
        elif self._passed is not None:
            self._kept.add(self._passed, self._states())
            self._passed = None
        self._chosen = chooser(logits, chosen, new=True)
        self.ahead = self._chosen.tokens

    def _run(self, tokens: mx.array, layers: list[Any]) -> mx.array:
        """Return the logits, [sequences, tokens, vocabulary]."""
        self.cache.reserve(tokens.shape[1])
        sequences, rows = self.sequences, self.cache.pass_rows
        drafting = self._engine_model.drafting
        if rows is None and drafting is None and self._engine_model.adapters is None:
            return self._model(tokens, cache=layers)  # type: ignore[no-any-return]
        if rows is not None:
            tokens = tokens[mx.array(rows[0])]
            sequences = [sequences[row] for row in rows[0]]
        with adapted(self._engine_model, sequences):
            # Hidden states take time, which requests without drafting should not spend.
            if (
                drafting is None
                or drafting.states is None
                or all(sequence.request.n_draft == 0 for sequence in self.sequences)
            ):
                logits: mx.array = self._model(tokens, cache=layers)
            else:
                with drafting.states.watched() as seen:
                    logits = self._model(tokens, cache=layers)
                self._passed = latest(seen, tokens.shape[0])
        if rows is not None:
            own = mx.array(rows[1])
            logits = logits[own]
            self._passed = None if self._passed is None else self._passed[own]
        return logits

    def _remember(self, ranges: Sequence[tuple[int, int]]) -> None:
        """Pass hidden states of the half-open ranges of the latest pass to the sequences."""
        if self._passed is not None:
            self._kept.flush(self._states())
            distribute(self._passed, self._states(), ranges)
            self._passed = None

    def _states(self) -> list[UnreadStates]:
        return [sequence.states for sequence in self.sequences]

    def _known(self) -> list[tuple[ExecutorSequence, list[int]]]:
        """Return the sequences, each with its tokens after `history` that have to be fed again."""
        return list(zip(self.sequences, self._again, strict=True))

    def _run_again(self, last_tokens: mx.array) -> mx.array:
        """Feed again what has to be, then the last tokens; returns the logits after these."""
        again, self._again = self._again, [[] for _ in self.sequences]
        counts = [len(own) + 1 for own in again]
        last = mx.array(counts)[:, None] - 1
        fed = kv.padded([[*own, 0] for own in again])
        fed = mx.put_along_axis(fed, last, last_tokens[:, None].astype(fed.dtype), axis=1)
        logits = self._run(fed, self.cache.begin(counts))
        self.cache.end(counts)
        return mx.take_along_axis(logits, last[:, :, None], axis=1)[:, 0]

    def _feed_again(self) -> None:
        """Feed a single sequence its tokens again, for models that cannot skip padding."""
        if any(self._again):
            (again,), (sequence,) = self._again, self.sequences
            with adapted(self._engine_model, [sequence]):
                self._model(mx.array([again]), cache=self.cache.layers)
            sequence.history += again
            self._again = [[]]

    def _launch_checked(self, width: int) -> bool:
        """Start a step that checks draft tokens; returns False, without a step, if none exist."""
        again = self._again
        if self._speculation is None or not self._speculation.ready(self._known()):
            return False
        assert self._chosen is not None
        last_tokens = self._chosen.read()
        known = [
            (sequence, [*own, token])
            for (sequence, own), token in zip(self._known(), last_tokens, strict=True)
        ]
        self._kept.flush(self._states())
        draft_tokens = self._speculation.propose(known, width)
        assert self.drafted is not None
        self.drafted = replace(self.drafted, behind=self._speculation.behind)
        if not any(draft_tokens):
            return False
        self._chooser = None  # because its penalties would count draft tokens that are rejected
        chosen = self._chosen
        fed = [[*tail, *own] for (_, tail), own in zip(known, draft_tokens, strict=True)]
        counts = list(map(len, fed))
        width = max(counts)
        logits = self._run(kv.padded(fed), self.cache.begin(counts))
        mx.async_eval(logits)
        masks, allowed = self._masks(last_tokens, draft_tokens, chosen.faults)
        places = [
            (row, len(again[row]) + at)
            for row, own in enumerate(allowed)
            for at in range(1 + len(own))
        ]
        logits = logits.reshape(-1, logits.shape[-1])
        if len(places) < logits.shape[0]:
            logits = logits[mx.array([row * width + at for row, at in places])]
        sequences = [self.sequences[row] for row, _ in places]
        pasts = [_past(self.sequences[row], fed[row][:at]) for row, at in places]
        steps = [self.sequences[row].delivered + 1 + at - len(again[row]) for row, at in places]
        last = mx.array([fed[row][at] for row, at in places], dtype=mx.uint32)
        choices = Chooser(sequences, pasts, self._engine_model).choose(logits, last, steps, masks)
        proposed = list(map(len, draft_tokens))
        self._fed = _Checked(chosen, last_tokens, proposed, allowed, choices, fed)
        return True

    def _rows(
        self, last_tokens: Sequence[int], draft_tokens: Sequence[Sequence[int]]
    ) -> list[tuple[ExecutorSequence, int, Sequence[int]]]:
        return list(zip(self.sequences, last_tokens, draft_tokens, strict=True))

    def _masks(
        self,
        last_tokens: Sequence[int],
        draft_tokens: Sequence[Sequence[int]],
        faults: dict[int, Exception],
    ) -> tuple[np.ndarray | None, list[Sequence[int]]]:
        """Pass each grammar its sequence's last token, and look ahead along the draft tokens.

        Returns the masks for all fed tokens of constrained sequences, one after the other, and the
        draft tokens that grammars allow. A grammar is postponed as in `Chooser`.
        """
        spent, most = 0.0, most_grammar_seconds(self.sequences, self._engine_model)
        size = words(self._engine_model.vocabulary)
        masks: list[np.ndarray] = []
        left: list[Sequence[int]] = []
        for sequence, token, own in self._rows(last_tokens, draft_tokens):
            rule = sequence.constraint
            if rule is None:
                left.append(own)
                continue
            allowed = np.full((1 + len(own), size), 0xFFFFFFFF, dtype=np.uint32)
            possible = 0
            with masking(sequence):
                if fill_mask(sequence, token, allowed[0], faults, late=spent > most):
                    possible = _looked_ahead(rule, own, allowed[1:])
            spent += sequence.mask_seconds
            left.append(own[:possible])
            masks.append(allowed[: 1 + possible])
        return np.concatenate(masks) if masks else None, left

    def _settle(self, checked: _Checked) -> list[Sampled]:
        """Read which draft tokens are accepted; the token after them is delivered too."""
        assert self._speculation is not None
        every, places = fitting(checked.choices.checked)
        unfit = {at: NotFinite() for at in places}
        logprobs: dict[int, TokenLogprob] = {}
        for part in checked.choices.logprobs:
            logprobs |= part.batch.read(part.computed, every)
        sampled = _delivered(sampled_of(checked.chosen, checked.last_tokens))
        right: list[int] = []
        latest: list[int] = []
        start = 0
        rows = self._rows(checked.last_tokens, checked.draft_tokens)
        for (sequence, _, draft_tokens), proposed in zip(rows, checked.proposed, strict=True):
            choices = every[start : start + 1 + len(draft_tokens)]
            count = common_prefix(draft_tokens, choices)
            sequence.delivered += count
            sequence.first_delivered = not sequence.postponed
            faults: dict[int, Exception] = {}
            for at, choice in enumerate([] if sequence.postponed else choices[: count + 1], start):
                accept(sequence, choice, faults)
                fault = unfit.get(at) or faults.get(id(sequence))
                sampled.append((sequence, choice, logprobs.get(at), fault, grammar_ended(sequence)))
            self._speculation.record(sequence, proposed, count)
            right.append(count)
            latest.append(choices[count])
            start += len(choices)
        assert self.drafted is not None
        self.drafted = replace(self.drafted, proposed=sum(checked.proposed), right=tuple(right))
        tokens = mx.array(latest, dtype=mx.uint32)
        self._chosen = Chosen(self.sequences, tokens, tokens, [], known=latest)
        pairs = zip(checked.fed, checked.proposed, right, strict=True)
        known = [fed[: len(fed) - proposed + count] for fed, proposed, count in pairs]
        self._remember(
            [(len(own) - 1 - count, len(own)) for own, count in zip(known, right, strict=True)]
        )
        kept = self.cache.end(list(map(len, known)))
        for sequence, own, count in zip(self.sequences, known, kept, strict=True):
            sequence.history += own[:count]
        self._again = [own[count:] for own, count in zip(known, kept, strict=True)]
        return sampled


def _looked_ahead(rule: AnswerRule, draft_tokens: Sequence[int], allowed: np.ndarray) -> int:
    """Return what `look_ahead` returns, or 0 if it fails, for example on a wrong draft token."""
    try:
        return rule.look_ahead(draft_tokens, allowed) if draft_tokens else 0
    except Exception:
        _log.warning("a grammar failed to look ahead; draft tokens are dropped", exc_info=True)
        return 0


def _delivered(sampled: list[Sampled], *, fed: bool = False) -> list[Sampled]:
    """Count the tokens; returns the tokens that were not delivered yet, and faults.

    fed: whether a pass was launched on the tokens, which then are part of the histories.
    """
    known = False
    for sequence, token, _, _, _ in sampled:
        sequence.delivered += 1
        if fed:
            sequence.history.append(token)
        known |= sequence.first_delivered
    if not known:
        return sampled
    new = [sample for sample in sampled if sample[3] is not None or not sample[0].first_delivered]
    for sequence, *_ in sampled:
        sequence.first_delivered = False
    return new


def _past(sequence: ExecutorSequence, tokens: Sequence[int]) -> Past:
    """Return a sequence's history for the penalties, followed by `tokens`."""
    known = [*sequence.history, *tokens] if sequence.request.sampling.remembers else ()
    return Past(known, len(sequence.prompt), sequence.longest)
