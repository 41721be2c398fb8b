"""Changes logits: adds a request's logit bias, and penalises tokens that occurred before.

Penalties need a row's earlier tokens, but the latest token is still being computed when the next
step is launched. So the history is stored in device arrays, to which the token is added without
being read. The arrays are rebuilt from the known tokens when rows join or leave the batch.

The repetition penalty is llama.cpp's (`repeat_penalty` over the last `repeat_last_n` tokens of
prompt and output). The frequency and presence penalties are OpenAI's, as vLLM interprets them: they
count all tokens of the output and none of the prompt. With a window they are those of mlx-lm, and
count the last tokens of prompt and output.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from backend.engine.request import Sampling
from backend.engine.sampling.subset import Subset

_NOTHING = -1  # fills a window that begins before the first token


@dataclass(frozen=True, slots=True)
class Past:
    """A row's known tokens, without the input token of the next step.

    longest: maximum number of tokens of prompt and output together.
    """

    tokens: Sequence[int]
    prompt_length: int
    longest: int


class BatchPenalties:
    """Bias and penalties of a fixed set of rows, with their token history."""

    def __init__(self, rows: Sequence[Sampling], pasts: Sequence[Past], vocabulary: int) -> None:
        self._biased = Subset([at for at, row in enumerate(rows) if row.logit_bias], len(rows))
        if self._biased:
            self._bias = _bias([rows[at] for at in self._biased.rows], vocabulary)
        self._repetition = _Recent(
            [_Part(row.repetition, row.window, neutral=1) for row in rows], pasts
        )
        self._presence = _Recent([_Part(row.presence, row.presence_window) for row in rows], pasts)
        self._frequency = _Recent(
            [_Part(row.frequency, row.frequency_window) for row in rows], pasts
        )
        self._output = _Output(
            [_Part(row.presence, not row.presence_window) for row in rows],
            [_Part(row.frequency, not row.frequency_window) for row in rows],
            pasts,
            vocabulary,
        )

    @property
    def nbytes(self) -> int:
        """Bytes of the biases and of the counts, both as wide as the vocabulary."""
        bias = self._bias.nbytes if self._biased else 0
        return bias + self._output.nbytes

    def __call__(self, logits: mx.array, fed: mx.array, steps: Sequence[int]) -> mx.array:
        """Return the changed logits, float32. Call this once per step, because it records `fed`.

        fed: [rows], the input tokens of this step.
        steps: per row, the number of generated tokens including `fed`; 0 if `fed` is the prompt's
            last token.
        """
        if self._biased:
            logits = self._biased.put(logits, self._biased.of(logits) + self._bias)
        if at := self._repetition.rows:
            own, (tokens, _) = at.of(logits), self._repetition.window(fed)
            before = mx.take_along_axis(own, tokens, axis=-1)
            by = self._repetition.strength
            pushed = mx.where(before > 0, before / by, before * by)
            logits = at.put(logits, mx.put_along_axis(own, tokens, pushed, axis=-1))
        if at := self._presence.rows:
            own, (tokens, _) = at.of(logits), self._presence.window(fed)
            pushed = mx.take_along_axis(own, tokens, axis=-1) - self._presence.strength
            logits = at.put(logits, mx.put_along_axis(own, tokens, pushed, axis=-1))
        if at := self._frequency.rows:
            own, (tokens, filled) = at.of(logits), self._frequency.window(fed)
            penalties = filled * self._frequency.strength
            row = mx.arange(len(at.rows))[:, None]
            logits = at.put(logits, own.at[row, tokens].subtract(penalties))
        if at := self._output.rows:
            logits = at.put(logits, at.of(logits) - self._output.taken(fed, steps))
        return logits


@dataclass(frozen=True, slots=True)
class _Part:
    """One row's setting of one penalty, which covers `reach` recent tokens.

    neutral: the strength with which the penalty has no effect.
    """

    strength: float
    reach: int
    neutral: float = 0

    @property
    def acts(self) -> bool:
        return self.reach > 0 and self.strength != self.neutral


class _Recent:
    """The last tokens of prompt and output of the rows to which one penalty applies.

    strength: [rows, 1] float32.
    """

    def __init__(self, parts: Sequence[_Part], pasts: Sequence[Past]) -> None:
        self.rows = Subset([at for at, part in enumerate(parts) if part.acts], len(parts))
        if not self.rows:
            return
        chosen = [parts[at] for at in self.rows.rows]
        known = [pasts[at] for at in self.rows.rows]
        self.strength = mx.array([[part.strength] for part in chosen])
        windows = [min(part.reach, past.longest) for part, past in zip(chosen, known, strict=True)]
        self._tokens = _recent(known, max(windows))
        self._inside = _inside(windows)

    def window(self, fed: mx.array) -> tuple[mx.array, mx.array]:
        """Add `fed`; returns the window's tokens, int32, and a mask of the real ones, bool.

        Both are [rows, longest window]. Columns before a row's first token repeat the latest token:
        setting its logit twice to the same value does no harm.
        """
        latest = self.rows.of(fed)[:, None].astype(mx.int32)
        self._tokens = mx.concatenate([self._tokens[:, 1:], latest], axis=1)
        filled = self._inside & (self._tokens != _NOTHING)
        return mx.where(filled, self._tokens, latest), filled


class _Output:
    """Counts how often each row has generated each token, for penalties without a window."""

    def __init__(
        self,
        presences: Sequence[_Part],
        frequencies: Sequence[_Part],
        pasts: Sequence[Past],
        vocabulary: int,
    ) -> None:
        pairs = list(zip(presences, frequencies, strict=True))
        acting = [at for at, pair in enumerate(pairs) if any(part.acts for part in pair)]
        self.rows = Subset(acting, len(pairs))
        if self.rows:
            self._presence, self._frequency = (
                mx.array([[part.strength * part.acts] for part in parts])
                for parts in zip(*(pairs[at] for at in acting), strict=True)
            )
            self._counts = _counts([pasts[at] for at in acting], vocabulary)

    @property
    def nbytes(self) -> int:
        return self._counts.nbytes if self.rows else 0

    def taken(self, fed: mx.array, steps: Sequence[int]) -> mx.array:
        """Count `fed`; returns the penalties to subtract, [rows, vocabulary]."""
        generated = mx.array([float(steps[at] > 0) for at in self.rows.rows])
        index = (mx.arange(len(self.rows.rows)), self.rows.of(fed))
        self._counts = self._counts.at[index].add(generated)
        once = (self._counts > 0).astype(mx.float32)
        return self._counts * self._frequency + once * self._presence


def _bias(rows: Sequence[Sampling], vocabulary: int) -> mx.array:
    bias = np.zeros((len(rows), vocabulary), dtype=np.float32)
    for row, sampling in zip(bias, rows, strict=True):
        for token, value in sampling.logit_bias:
            row[token] += value
    return mx.array(bias)


def _recent(pasts: Sequence[Past], width: int) -> mx.array:
    """Return the latest tokens of each row, right-aligned, [rows, width] int32."""
    recent = np.full((len(pasts), width), _NOTHING, dtype=np.int32)
    for row, past in zip(recent, pasts, strict=True):
        if latest := past.tokens[-width:]:
            row[-len(latest) :] = latest
    return mx.array(recent)


def _inside(windows: Sequence[int]) -> mx.array:
    """Return a mask of the columns inside each row's window, [rows, longest window]."""
    width = max(windows)
    return mx.arange(width)[None] >= width - mx.array(list(windows))[:, None]


def _counts(pasts: Sequence[Past], vocabulary: int) -> mx.array:
    """Return how often each token was generated, [rows, vocabulary] float32."""
    counts = mx.zeros((len(pasts), vocabulary))
    outputs = [past.tokens[past.prompt_length :] for past in pasts]
    rows = [row for row, output in enumerate(outputs) for _ in output]
    if rows:
        tokens = [token for output in outputs for token in output]
        counts = counts.at[mx.array(rows), mx.array(tokens)].add(1.0)
    return counts
