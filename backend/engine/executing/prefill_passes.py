"""Launches prefill passes, and waits for those in flight behind decode steps."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import mlx.core as mx

from backend.engine.caching import kv
from backend.engine.drafting.hidden_states import MOST as MOST_STATES
from backend.engine.drafting.hidden_states import latest
from backend.engine.executing.choosing import (
    Chosen,
    Sampled,
    first_tokens,
    read_early,
)
from backend.engine.executing.executor_sequence import ExecutorSequence, Rows, adapted
from backend.engine.executing.kept_entries import PrefixFiles
from backend.engine.executing.scoring import longest_chunk, prompt_logprobs
from backend.engine.executing.step_times import StepTimes
from backend.engine.model import EngineModel
from backend.engine.planning.plan import PlannerEvent, Prefill, Prefilled, PrefillTimed


@dataclass(slots=True)
class PrefillPass:
    """A prefill pass that was launched but not waited for.

    tokens: number of computed tokens, including padding.
    read: number of computed tokens without padding.
    behind: number of tokens before the computed ones, in the longest prompt.
    at: time when the pass was started, in seconds.
    ahead: whether the pass was started before the previous pass had ended.
    last: whether the pass completes a prompt.
    done: time when the pass was computed, if that happened within the launch.
    seconds: how long the device took; negative until that is known.
    marks: small arrays that are available when the pass is done.
    chosen: the first tokens of the sequences whose prompts the pass completes.
    logits: logits of prompt tokens whose log-probabilities are requested, [tokens, vocabulary].
    following: the tokens after these.
    saves: the KV to write to disk when the pass is done.
    """

    tokens: int
    read: int
    behind: int
    sequences: tuple[ExecutorSequence, ...]
    at: float
    ahead: bool = False
    last: bool = False
    done: float = math.inf
    seconds: float = -1.0
    marks: list[mx.array] = field(default_factory=list)
    chosen: Chosen | None = None
    logits: mx.array | None = None
    following: Sequence[int] = ()
    saves: list[tuple[ExecutorSequence, Sequence[int], kv.RowCache]] = field(default_factory=list)

    def wait(self) -> None:
        """Wait until the pass is computed. Raises what MLX raises."""
        mx.eval(self.marks)
        if self.logits is not None:
            (sequence,) = self.sequences
            alternatives = sequence.request.prompt_logprobs
            assert alternatives is not None
            sequence.prompt_logprobs += prompt_logprobs(self.logits, self.following, alternatives)

    def read_first(self) -> list[Sampled]:
        """Return the first tokens of sequences that wait to join their batch.

        They are read before the batch's step is launched, because a launch takes time.
        """
        chosen = self.chosen
        if chosen is None or all(sequence.first is not chosen for sequence in self.sequences):
            return []
        return read_early(chosen, lambda sequence: sequence.first is chosen)


class PrefillPasses:
    """The passes of one loaded model that were launched but not waited for."""

    def __init__(self, model: EngineModel, files: PrefixFiles, times: StepTimes) -> None:
        self._model, self._files, self._times = model, files, times
        # processor time of this step's grammars; None if no sequence decodes without a grammar
        self.grammar_seconds: float | None = None
        self.ahead = False  # `ahead` of the plan
        self._untimed: list[PrefillPass] = []  # passes that have ended at an unknown time
        self._launched: list[PrefillPass] = []  # passes in flight of this step
        self._earlier: list[PrefillPass] = []  # passes in flight of earlier steps

    @property
    def logit_bytes(self) -> int:
        """Bytes of logits that have not been read yet."""
        logits = [launched.logits for launched in self.in_flight if launched.logits is not None]
        return sum(array.nbytes for array in logits)

    def launch(
        self, parts: Sequence[tuple[ExecutorSequence, Prefill]], events: list[PlannerEvent]
    ) -> None:
        """Start a pass of one prompt, or of several, each padded to the longest.

        Prompts with images or audio, or with requested log-probabilities, have passes of their
        own. Raises what MLX raises: the KV of all the sequences is then undefined.
        """
        began = self._times.clock()
        group = Rows.gathered([sequence for sequence, _ in parts])
        group.cache.expect(max(len(sequence.tokens) for sequence, _ in parts) + 1)
        planned = {part.sequence: part for _, part in parts}
        ordered = [(sequence, planned[sequence.number]) for sequence in group.sequences]
        ends = [(sequence, part, self._end(sequence, part)) for sequence, part in ordered]
        first, part, end = ends[0]
        alternatives = first.request.prompt_logprobs
        media = first.media_prefill if part.start < len(first.prompt) else None
        if first.media_prefill is not None or alternatives is not None:
            self.wait_for_earlier()
            if media is not None and media.get_features(part.start, end):
                return  # Encoding an image or audio is a separate pass, which cannot be divided.
            began = self._times.clock()
        texts = [sequence.tokens[part.start : end] for sequence, part, end in ends]
        counts = [len(text) for text in texts]
        width = max(counts)
        group.cache.reserve(width)
        padded = kv.padded(texts)

        def run() -> mx.array:
            if media is not None:
                return media.run(part.start, end, group.cache.layers)
            with group.cache.prefill(counts) as layers, adapted(self._model, group.sequences):
                logits: mx.array = self._model.model(padded, cache=layers)
            return logits

        behind = max(part.start for _, part, _ in ends)
        together = tuple(group.sequences)
        launched = PrefillPass(width * len(ends), sum(counts), behind, together, began)
        run = self._keeping_states(run, counts, launched)
        whole = [at for at, (sequence, _, end) in enumerate(ends) if end == len(sequence.tokens)]
        last: mx.array | None = None
        if alternatives is not None:
            logits = run()
            last = logits[:, -1]
            if part.start < len(first.prompt) - 1:
                launched.following = first.prompt[part.start + 1 : end + 1]
                launched.logits = logits[0, : len(launched.following)]
        elif whole:
            last = self._model.head.last(run, counts)
            last = last if len(whole) == len(ends) else last[mx.array(whole)]
        else:
            run()
        for (sequence, _, _), text in zip(ends, texts, strict=True):
            sequence.history += text
        self._finish_launch(launched, group, ends, last, events)

    def due(self, *, idle: bool) -> Iterator[PrefillPass]:
        """Yield the passes to wait for now, in the order in which they were launched.

        The passes of this step stay in flight behind the next decode step or, if no sequence
        decodes, behind the next passes, unless one of them completes a prompt. On a CPU no pass
        stays in flight, because a launch computes the next step immediately, and none with
        log-probabilities of its prompt, because the answer could end without them.
        idle: whether no sequence decodes.
        """
        last = idle and any(launched.last for launched in self._launched)
        waiting = len(self._earlier) + (len(self._launched) if last else 0)
        self._earlier += self._launched
        self._launched = []
        for at, launched in enumerate(self._earlier, 1):
            if self._times.in_order or launched.logits is not None:
                waiting = max(waiting, at)
        for _ in range(waiting):
            yield self._earlier.pop(0)

    def wait_for_earlier(self) -> None:
        """Wait on a GPU for all work that was started, so that the time of each pass is known.

        Call this when the graph of the next pass is built, so that the device is hardly idle.
        """
        if self._times.in_order:
            return
        self._times.wait_for_decode()
        for launched in self.in_flight:
            with contextlib.suppress(Exception):  # raised again by the pass's own `wait`
                mx.eval(launched.marks)
            self.time(launched)

    def ended(self, launched: PrefillPass) -> list[PrefillTimed]:
        """Return the times that are known when a pass has been waited for.

        If the next pass was started ahead, the end of this pass is not known. Such passes are
        reported together with later passes, with the mean of their times.
        """
        self.time(launched)
        self._untimed.append(launched)
        if self._earlier and self._earlier[0].ahead:
            return []
        passes, self._untimed = self._untimed, []
        tokens = sum(timed.tokens for timed in passes)
        seconds = sum(timed.seconds for timed in passes) / len(passes)
        behind = sum(timed.tokens * timed.behind for timed in passes) // tokens
        return [PrefillTimed(tokens // len(passes), seconds, behind)] * len(passes)

    def time(self, launched: PrefillPass) -> None:
        """Record the time of a pass that has just ended, unless the time is known."""
        if launched.seconds < 0:
            launched.seconds = self._times.finished(launched.at, launched.done)

    def forget(self, sequence: ExecutorSequence) -> None:
        """Ignore the sequence in all passes in flight."""
        for launched in self.in_flight:
            launched.sequences = tuple(
                other for other in launched.sequences if other is not sequence
            )

    def has(self, sequence: ExecutorSequence) -> bool:
        """Return whether a pass of the sequence is in flight."""
        return any(sequence in launched.sequences for launched in self.in_flight)

    def clear(self) -> None:
        self._earlier, self._launched, self._untimed = [], [], []

    @property
    def in_flight(self) -> list[PrefillPass]:
        """The passes that were launched and not waited for."""
        return self._earlier + self._launched

    def _keeping_states(
        self, run: Callable[[], mx.array], counts: list[int], launched: PrefillPass
    ) -> Callable[[], mx.array]:
        """Return a function that calls `run` and stores the hidden states that drafters read.

        Only the states of the prompts' latest tokens are collected, because a pass has many more.
        """
        drafting, sequences = self._model.drafting, launched.sequences
        wanted = [_wanted_states(*pair) for pair in zip(sequences, counts, strict=True)]
        if drafting is None or (states := drafting.states) is None or not any(wanted):
            return run
        most = max(wanted)

        def watched() -> mx.array:
            columns = mx.array(counts)[:, None] + mx.arange(-most, 0)
            with states.watched(mx.maximum(columns, 0)) as seen:
                logits = run()
            passed = latest(seen, len(sequences))
            for row, (sequence, count) in enumerate(zip(sequences, wanted, strict=True)):
                if count and passed is not None:
                    kept = mx.contiguous(passed[row, most - count :])
                    sequence.states.add(kept)
                    launched.marks.append(kept)
            return logits

        return watched

    def _end(self, sequence: ExecutorSequence, part: Prefill) -> int:
        """Return the length of the sequence at which the next chunk ends.

        The chunk ends before the prompt's last token if a prompt cache file needs the KV without
        that token. It ends with the prompt if media or a prompt to be read in one pass begin it,
        and tokens of the answer follow, as they do after a preemption.
        """
        end, prompt, media = part.end, len(sequence.prompt), sequence.media_prefill
        if part.start < prompt - 1 < end and not (self._model.trims or self._model.reads_whole):
            end = prompt - 1 if self._files.want_prompt(sequence) else end
        if sequence.request.prompt_logprobs is not None:
            end = min(end, part.start + longest_chunk(self._model.vocabulary))
            end = end if media is None else media.uncut(part.start, end)
        whole = media is not None or self._model.reads_whole
        return min(end, prompt) if whole and part.start < prompt else end

    def _finish_launch(
        self,
        launched: PrefillPass,
        group: Rows,
        ends: Sequence[tuple[ExecutorSequence, Prefill, int]],
        last: mx.array | None,
        events: list[PlannerEvent],
    ) -> None:
        """Sample the first tokens, take the snapshots, and start the device.

        ends: the sequences, each with its part of the plan and the length that it reaches.
        last: logits of the last tokens of completed prompts, [sequences, vocabulary].
        """
        if not self._times.in_order:
            launched.ahead = self.ahead and bool(self.in_flight)
            if not launched.ahead:
                self.wait_for_earlier()
            launched.at = self._times.clock()
        # The last token of a prompt without an answer is not always prefilled.
        launched.last = any(end >= len(sequence.tokens) - 1 for sequence, _, end in ends)
        whole = [sequence for sequence, _, end in ends if end == len(sequence.tokens)]
        if last is not None and whole:
            chosen = first_tokens(whole, last, self._model, spent=self.grammar_seconds)
            launched.marks += chosen.arrays
            launched.chosen = chosen
            for sequence in whole:
                sequence.first = chosen
        snapshots: list[kv.Snapshot] = []
        group.cache.own_states()
        for at, (sequence, part, end) in enumerate(ends):
            kept = part.snapshot and end == part.end
            if kept:
                sequence.snapshots[end] = group.cache.snapshot(at)
                snapshots.append(sequence.snapshots[end])
            last_token = len(sequence.prompt) - 1
            if part.start < last_token <= end and self._files.want_prompt(sequence):
                row = group.extract(sequence)
                kv.trim(row, end - last_token)
                kv.start_copies([row])
                launched.saves.append((sequence, sequence.tokens[:last_token], row))
            events.append(Prefilled(sequence.number, end, kept))
        launched.marks.append(group.cache.marker(snapshots))
        mx.async_eval(launched.marks)
        if launched.logits is not None:
            mx.async_eval(launched.logits)
        if self._times.in_order:
            launched.done = self._times.clock()
        self._launched.append(launched)


def _wanted_states(sequence: ExecutorSequence, count: int) -> int:
    """Return of how many of the last tokens of a pass a drafter reads the states.

    count: number of the sequence's tokens in the pass.
    """
    if sequence.media is not None or sequence.request.n_draft == 0:
        return 0
    after = len(sequence.tokens) - len(sequence.history) - count
    return max(min(count, MOST_STATES - after), 0)
