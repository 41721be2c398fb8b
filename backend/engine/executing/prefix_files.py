"""Decides which KV is saved to disk, and copies it."""

from __future__ import annotations

from collections.abc import Sequence

from backend.engine.caching import kv
from backend.engine.executing.executor_sequence import ExecutorSequence
from backend.engine.model import EngineModel


class PrefixFiles:
    """Saves the KV that requests of one loaded model ask to store on disk."""

    def __init__(self, model: EngineModel) -> None:
        self._model = model

    def want_answer(self, sequence: ExecutorSequence) -> bool:
        return sequence.finished and sequence.request.disk.saves_answer and self._may_hold(sequence)

    def want_prompt(self, sequence: ExecutorSequence) -> bool:
        """Return whether to save the prompt without its last token, which gives the logits."""
        if sequence.scoring is not None or not self._may_hold(sequence):
            return False
        return sequence.request.disk.saves_prompt(trimmable=self._model.trims)

    def save(self, sequence: ExecutorSequence, tokens: Sequence[int], cache: kv.RowCache) -> None:
        """Pass a copy of the KV to the disk thread."""
        assert self._model.disk is not None
        kv.evaluate(cache)
        copied, trimmable = kv.clone(cache), kv.can_trim(cache)
        path = sequence.request.disk.path
        self._model.disk.save(list(tokens), copied, trimmable=trimmable, path=path)

    def _may_hold(self, sequence: ExecutorSequence) -> bool:
        """Return whether the sequence's KV can be in a file; it cannot with media or an adapter."""
        disk = self._model.disk
        return (
            disk is not None
            and sequence.media is None
            and not sequence.request.adapter
            and disk.has_files(sequence.request.disk.path)
        )
