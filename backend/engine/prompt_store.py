"""Where the KV of earlier prompts is kept: in memory, and on disk where that is asked for.

A new row starts from the longest prefix that either has, on a copy. All of this is optional work:
what fails is a miss later, not an error now.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from backend.engine import kv
from backend.engine.batch import DecodeBatch
from backend.engine.disk_cache.cache import DiskCache
from backend.engine.model import EngineModel
from backend.engine.prefix_cache import PrefixCache
from backend.engine.row import Row
from backend.engine.siblings import Sibling, closest

Report = Callable[[str, BaseException], None]


class PromptStore:
    """The stores of one loaded model. report: logs a fault with its exception."""

    def __init__(self, model: EngineModel, report: Report) -> None:
        self._model = model
        self._report = report
        self.memory: PrefixCache[kv.RowCache] = PrefixCache(
            model.prompt_cache_bytes, model.max_cache_entries
        )

    def start(self, row: Row) -> None:
        """Give the row its cache, filled with the longest stored prefix."""
        match = self.memory.find(row.key)
        length = row.whole_media(match.length)
        # A stored prefix has no logits left, so who asks for the prompt's has it read anew.
        reusable = row.request.prompt_logprobs is None and length > 0
        self._restore(row, length)
        if row.cache is None and match.entry is not None and reusable:
            cut = len(match.entry.tokens) - length
            if match.entry.trimmable or not cut:
                cache = kv.clone(match.entry.payload)
                if kv.trim(cache, cut):
                    row.cache, row.filled, row.reused = cache, length, length
        if row.cache is None:
            row.cache = kv.new_row(self._model.model)
        trims = kv.always_trims(row.cache)
        if self.memory.max_bytes and (row.stable or not trims):
            last = len(row.prompt) - 1
            end = min(row.stable, last) if row.stable else last
            branch = 0 if trims else row.whole_media(match.branch)
            row.checkpoints = tuple(sorted({branch, end} - {0}))

    def sibling(self, row: Row, prefilling: Iterable[Row]) -> Sibling | None:
        """The row in prefill that the waiting row should start from; what both share gets stored.

        None where nothing is gained: too little is shared, or more than that is stored already.
        """
        if not self.memory.max_bytes or row.request.prompt_logprobs is not None:
            return None
        held = max(self.memory.held(row.key), row.stored.length if row.stored else 0)
        sibling = closest(row, prefilling, held)
        if sibling is None:
            return None
        elder = sibling.row
        if not sibling.reached:
            elder.checkpoints = tuple(sorted({*elder.checkpoints, sibling.length}))
        else:
            self._store_part(elder)
        return sibling

    def prefilled(self, row: Row, computed: int) -> None:
        """The row has just got `computed` tokens, and holds `row.filled` of its prompt."""
        assert row.cache is not None
        whole = row.filled == len(row.prompt) - 1
        # Where later prompts are known to part from this one, what comes after is of no use.
        if row.filled in row.checkpoints or (whole and computed and not row.stable):
            self._store(kv.clone(row.cache), row.key[: row.filled])
        disk, use = self._disk(row), row.request.disk
        if disk is None or row.scoring is not None or not whole or not (computed or use.path):
            return
        trimmable = kv.can_trim(row.cache)
        if use.saves_prompt(trimmable=trimmable):
            tokens = row.prompt[: row.filled]
            disk.save(tokens, kv.clone(row.cache), trimmable=trimmable, path=use.path)

    def answered(self, row: Row, batch: DecodeBatch) -> None:
        """The row has ended in the batch."""
        use = row.request.disk
        disk = self._disk(row) if use.saves_answer else None
        if not self.memory.max_bytes and disk is None:
            return
        try:
            cache, tokens = batch.extract(row)
            kv.evaluate(cache)
        except Exception as fault:
            self._report("prompt cache", fault)
            return
        if disk is not None:
            disk.save(tokens, kv.clone(cache), trimmable=kv.can_trim(cache), path=use.path)
        self._store(cache, row.key_of(tokens))

    def _disk(self, row: Row) -> DiskCache | None:
        """The files, for prompts of text alone: they know nothing of what an image shows."""
        return self._model.disk if row.media is None else None

    def _restore(self, row: Row, held: int) -> None:
        """Start the row from what was read from disk, if that is more than memory holds."""
        stored, row.stored = row.stored, None
        if stored is None or stored.length <= held or self._model.disk is None:
            return
        row.cache = self._model.disk.restore(stored, kv.new_row(self._model.model))
        if row.cache is not None:
            row.filled = row.reused = stored.length

    def _store_part(self, row: Row) -> None:
        """Store what a row in the middle of its prefill holds; whoever uses it cuts it back."""
        midway = row.filled < len(row.prompt) - 1
        if midway and row.cache is not None and kv.can_trim(row.cache):
            self._store(kv.clone(row.cache), row.key[: row.filled])

    def _store(self, cache: kv.RowCache, tokens: Sequence[int]) -> None:
        try:
            self.memory.store(tokens, cache, kv.nbytes(cache), trimmable=kv.can_trim(cache))
        except Exception as fault:
            self._report("prompt cache", fault)
