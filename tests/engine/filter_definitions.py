"""What each filter keeps according to its definition, in NumPy and double precision."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from backend.engine.request import Sampling

_CLOSE = 2e-5  # a token so close to the threshold may be kept or dropped by rounding in float32


class Undecided(Exception):
    """The result depends on rounding, so the definition does not decide it."""


def _shares(logits: np.ndarray, keep: np.ndarray) -> np.ndarray:
    weights = np.where(keep, np.exp(logits - logits[keep].max()), 0)
    shares: np.ndarray = weights / weights.sum()
    return shares


def _until(order: Sequence[int], shares: np.ndarray, most: float) -> np.ndarray:
    """The first tokens of the order, up to the one with which their probabilities reach `most`."""
    keep = np.zeros(len(shares), dtype=bool)
    total = 0.0
    for token in order:
        if total > 0 and abs(total - most) < _CLOSE:
            raise Undecided
        if total >= most:
            break
        keep[token] = True
        total += shares[token]
    return keep


def _typical(logits: np.ndarray, keep: np.ndarray, most: float) -> np.ndarray:
    shares = _shares(logits, keep)
    known = np.where(shares > 0, shares, 1)
    entropy = -(shares * np.log(known)).sum()
    strange = np.where(keep & (shares > 1e-38), np.abs(-np.log(known) - entropy), np.inf)
    ranked = np.lexsort((np.arange(len(logits)), -logits, strange))
    first: np.ndarray = _until(ranked.tolist(), shares, most) & keep
    near = np.abs(strange[first].max() - strange) < 1e-4
    if np.any(near & keep & (logits != logits[first][strange[first].argmax()])):
        raise Undecided
    return first


def _excluded(logits: np.ndarray, keep: np.ndarray, threshold: float) -> np.ndarray:
    shares = _shares(logits, keep)
    if np.any(keep & (np.abs(shares - threshold) < _CLOSE)):
        raise Undecided
    likely = np.flatnonzero(keep & (shares >= threshold))
    best_first = likely[np.lexsort((likely, -logits[likely]))]
    out: np.ndarray = np.isin(np.arange(len(logits)), best_first[:-1])
    return out


def kept(logits: np.ndarray, row: Sampling) -> np.ndarray:
    """llama.cpp's chain, [vocabulary] bool: top_k, typical_p, top_p, min_p, XTC.

    XTC always takes part where its probability is not 0. Raises Undecided.
    """
    logits = logits.astype(np.float64)
    keep: np.ndarray = np.isfinite(logits)
    order = np.argsort(-logits, kind="stable")
    if row.top_k:
        keep &= np.isin(np.arange(len(logits)), order[: row.top_k])
    if row.typical_p < 1:
        keep &= _typical(logits, keep, row.typical_p)
    if row.top_p < 1:
        keep &= _until([at for at in order if keep[at]], _shares(logits, keep), row.top_p)
    if row.min_p > 0:
        least = logits[keep].max() + np.log(row.min_p)
        if row.min_p < 1 and np.any(keep & (np.abs(logits - least) < _CLOSE)):
            raise Undecided
        keep &= logits >= least
    if row.xtc_probability:
        keep &= ~_excluded(logits, keep, row.xtc_threshold)
    return keep
