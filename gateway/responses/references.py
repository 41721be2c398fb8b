"""References to stored items, and the items that they stand for."""

from __future__ import annotations

from collections.abc import Sequence

from gateway.responses.items import ITEMS, Item, ItemReference, Sent
from gateway.responses.store import Store


def resolved(sent: Sequence[Sent], store: Store) -> list[Item]:
    """The input with every reference replaced. Raises ApiError for one to nothing that is kept."""
    return [
        _found(item, store, f"input[{index}].id") if isinstance(item, ItemReference) else item
        for index, item in enumerate(sent)
    ]


def _found(reference: ItemReference, store: Store, param: str) -> Item:
    return ITEMS.validate_python([store.item(reference.id, param)])[0]
