"""Pushes logits up and down: the bias of a request, and penalties on tokens that came before.

Penalties need the tokens of a row, the latest of which is still being computed when the next step
is launched. So what they remember lives in arrays that are fed the token as it is, unread, and is
built anew from the known tokens when rows join or leave.

The repetition penalty is llama.cpp's (`repeat_penalty` over the last `repeat_last_n` tokens of
prompt and output). Frequency and presence penalty are OpenAI's, in vLLM's reading: they count the
output alone, all of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from backend.engine.request import Sampling
from backend.engine.subset import Subset


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
        size = len(rows)
        self._biased = Subset([at for at, row in enumerate(rows) if row.logit_bias], size)
        self._repeating = Subset([at for at, row in enumerate(rows) if row.repetition != 1], size)
        adding = [at for at, row in enumerate(rows) if row.frequency or row.presence]
        self._adding = Subset(adding, size)
        if self._biased:
            self._bias = _bias([rows[at] for at in self._biased.places], vocabulary)
        if self._repeating:
            chosen = [rows[at] for at in self._repeating.places]
            known = [pasts[at] for at in self._repeating.places]
            self._repetition = mx.array([[row.repetition] for row in chosen])
            windows = [
                min(row.window, past.longest) for row, past in zip(chosen, known, strict=True)
            ]
            self._recent = _recent(known, max(windows), vocabulary)
            self._inside = _inside(windows)
        if self._adding:
            chosen = [rows[at] for at in adding]
            self._frequency = mx.array([[row.frequency] for row in chosen])
            self._presence = mx.array([[row.presence] for row in chosen])
            self._counts = _counts([pasts[at] for at in adding], vocabulary)

    def __call__(self, logits: mx.array, fed: mx.array, steps: Sequence[int]) -> mx.array:
        """The logits, changed. Call it once per step: it remembers `fed`.

        logits: [rows, vocabulary] float32. fed: [rows], the tokens that led to these logits.
        steps: per row, tokens generated up to and including the fed one; 0 where that is the
        prompt's last.
        """
        if self._biased:
            logits = self._biased.put(logits, self._biased.of(logits) + self._bias)
        if self._repeating:
            latest = self._repeating.of(fed)[:, None].astype(mx.int32)
            self._recent = mx.concatenate([self._recent[:, 1:], latest], axis=1)
            own = self._repeating.of(logits)
            scaled = mx.where(own > 0, own / self._repetition, own * self._repetition)
            own = mx.where(self._seen(own.shape), scaled, own)
            logits = self._repeating.put(logits, own)
        if self._adding:
            generated = mx.array([float(steps[at] > 0) for at in self._adding.places])
            place = (mx.arange(len(self._adding.places)), self._adding.of(fed))
            self._counts = self._counts.at[place].add(generated)
            once = (self._counts > 0).astype(mx.float32)
            own = self._adding.of(logits)
            own = own - self._counts * self._frequency - once * self._presence
            logits = self._adding.put(logits, own)
        return logits

    def _seen(self, shape: tuple[int, ...]) -> mx.array:
        """Which tokens stand in the window, [rows, vocabulary]; a column more takes the padding."""
        rows, vocabulary = shape
        places = mx.where(self._inside, self._recent, vocabulary)
        seen = mx.put_along_axis(
            mx.zeros((rows, vocabulary + 1), dtype=mx.bool_), places, mx.array(True), axis=-1
        )
        return seen[:, :vocabulary]


def _bias(rows: Sequence[Sampling], vocabulary: int) -> mx.array:
    bias = np.zeros((len(rows), vocabulary), dtype=np.float32)
    for row, sampling in zip(bias, rows, strict=True):
        for token, value in sampling.logit_bias:
            row[token] += value
    return mx.array(bias)


def _recent(pasts: Sequence[Past], width: int, padding: int) -> mx.array:
    """The latest tokens of each row, right-aligned, [rows, width] int32."""
    recent = np.full((len(pasts), width), padding, dtype=np.int32)
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
    counts = np.zeros((len(pasts), vocabulary), dtype=np.float32)
    for row, past in zip(counts, pasts, strict=True):
        np.add.at(row, np.asarray(past.tokens[past.prompt_length :], dtype=np.int64), 1)
    return mx.array(counts)
