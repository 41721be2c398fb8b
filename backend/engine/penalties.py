"""Pushes logits up and down: the bias of a request, and penalties on tokens that came before.

Penalties need the tokens of a row, the latest of which is still being computed when the next step
is launched. So what they remember lives in arrays that are fed the token as it is, unread, and is
built anew from the known tokens when rows join or leave.

The repetition penalty is llama.cpp's (`repeat_penalty` over the last `repeat_last_n` tokens of
prompt and output). Frequency and presence penalty are OpenAI's, in vLLM's reading: they count the
output alone, all of it; with a window they are mlx-lm's, and count the last tokens of prompt and
output.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from backend.engine.request import Sampling
from backend.engine.subset import Subset

_NOTHING = -1  # stands where a window reaches behind the first token


@dataclass(frozen=True, slots=True)
class Past:
    """What is known of a row: its tokens but for the one that is fed next, and its bounds.

    longest: tokens of prompt and output together, at most.
    """

    tokens: Sequence[int]
    prompt_length: int
    longest: int


class BatchPenalties:
    """Bias and penalties of a fixed set of rows, with their memory."""

    def __init__(self, rows: Sequence[Sampling], pasts: Sequence[Past], vocabulary: int) -> None:
        self._biased = Subset([at for at, row in enumerate(rows) if row.logit_bias], len(rows))
        if self._biased:
            self._bias = _bias([rows[at] for at in self._biased.places], vocabulary)
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
        """Bytes of the biases and of the counts, which are as wide as the vocabulary."""
        bias = self._bias.nbytes if self._biased else 0
        return bias + self._output.nbytes

    def __call__(self, logits: mx.array, fed: mx.array, steps: Sequence[int]) -> mx.array:
        """The logits, changed. Call it once per step: it remembers `fed`.

        logits: [rows, vocabulary] float32. fed: [rows], the tokens that led to these logits.
        steps: per row, tokens generated up to and including the fed one; 0 where that is the
        prompt's last.
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
            taken = filled * self._frequency.strength
            row = mx.arange(len(at.places))[:, None]
            logits = at.put(logits, own.at[row, tokens].subtract(taken))
        if at := self._output.rows:
            logits = at.put(logits, at.of(logits) - self._output.taken(fed, steps))
        return logits


@dataclass(frozen=True, slots=True)
class _Part:
    """What a row asks of one penalty. reach: tokens that it looks back; 0: it is not meant."""

    strength: float
    reach: int
    neutral: float = 0

    @property
    def acts(self) -> bool:
        return self.reach > 0 and self.strength != self.neutral


class _Recent:
    """The last tokens of prompt and output, of the rows that one penalty acts on.

    strength: [rows, 1] float32.
    """

    def __init__(self, parts: Sequence[_Part], pasts: Sequence[Past]) -> None:
        self.rows = Subset([at for at, part in enumerate(parts) if part.acts], len(parts))
        if not self.rows:
            return
        chosen = [parts[at] for at in self.rows.places]
        known = [pasts[at] for at in self.rows.places]
        self.strength = mx.array([[part.strength] for part in chosen])
        windows = [min(part.reach, past.longest) for part, past in zip(chosen, known, strict=True)]
        self._tokens = _recent(known, max(windows))
        self._inside = _inside(windows)

    def window(self, fed: mx.array) -> tuple[mx.array, mx.array]:
        """The tokens of the window, [rows, longest window] int32; remembers `fed`.

        And at which places there is one. The other places repeat the latest token, which takes no
        harm from being pushed to the same logit twice.
        """
        latest = self.rows.of(fed)[:, None].astype(mx.int32)
        self._tokens = mx.concatenate([self._tokens[:, 1:], latest], axis=1)
        filled = self._inside & (self._tokens != _NOTHING)
        return mx.where(filled, self._tokens, latest), filled


class _Output:
    """How often the rows have generated each token, for penalties without a window."""

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
        """What to subtract, [rows, vocabulary]; remembers `fed`."""
        generated = mx.array([float(steps[at] > 0) for at in self.rows.places])
        place = (mx.arange(len(self.rows.places)), self.rows.of(fed))
        self._counts = self._counts.at[place].add(generated)
        once = (self._counts > 0).astype(mx.float32)
        return self._counts * self._frequency + once * self._presence


def _bias(rows: Sequence[Sampling], vocabulary: int) -> mx.array:
    bias = np.zeros((len(rows), vocabulary), dtype=np.float32)
    for row, sampling in zip(bias, rows, strict=True):
        for token, value in sampling.logit_bias:
            row[token] += value
    return mx.array(bias)


def _recent(pasts: Sequence[Past], width: int) -> mx.array:
    """The latest tokens of each row, right-aligned, [rows, width] int32."""
    recent = np.full((len(pasts), width), _NOTHING, dtype=np.int32)
    for row, past in zip(recent, pasts, strict=True):
        if latest := past.tokens[-width:]:
            row[-len(latest) :] = latest
    return mx.array(recent)


def _inside(windows: Sequence[int]) -> mx.array:
    """Which columns of the latest tokens count, [rows, longest window]."""
    width = max(windows)
    return mx.arange(width)[None] >= width - mx.array(list(windows))[:, None]


def _counts(pasts: Sequence[Past], vocabulary: int) -> mx.array:
    """How often each token was generated, [rows, vocabulary] float32."""
    counts = mx.zeros((len(pasts), vocabulary))
    outputs = [past.tokens[past.prompt_length :] for past in pasts]
    rows = [row for row, output in enumerate(outputs) for _ in output]
    if rows:
        tokens = [token for output in outputs for token in output]
        counts = counts.at[mx.array(rows), mx.array(tokens)].add(1.0)
    return counts
