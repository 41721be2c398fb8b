"""One forward pass of a vision-language model by mlx-vlm's own code, over a whole sequence.

The engine's answers are compared with it (`loading/serving_trial`).
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from backend.engine.caching import kv
from backend.engine.caching.row_shift import RowShift
from backend.engine.vision.features import thawed
from backend.engine.vision.media_plan import MediaItem, Span
from backend.engine.vision.multimodal_model import MultimodalModel, accepted
from backend.engine.vision.positions import GRIDS, positions_of


def plain_pass(
    model: MultimodalModel, tokens: Sequence[int], item: MediaItem | None, prompt: int
) -> mx.array:
    """Logits, [tokens, vocabulary].

    item: the item at the start of `tokens`; None: all are text. prompt: how many of them are the
    prompt, which matters only if its tokens attend to later ones.
    """
    whole, language = model.whole, model.language_model
    arrays = {} if item is None else thawed(item.arrays)
    pixels = arrays.pop("pixel_values", None)
    encoded = item.encoded if item is not None else ()
    ids = mx.array([[*encoded, *tokens[len(item.whole) :]] if item and encoded else list(tokens)])
    rest = {"mask": mx.ones(ids.shape, dtype=mx.int32), **arrays}
    embed = whole.get_input_embeddings
    output = embed(ids, pixels, **accepted(embed, rest)).to_dict()
    given = {name: value for name, value in output.items() if value is not None}
    cache = [layer for layer in kv.new_row(model) if not isinstance(layer, RowShift)]
    given |= {name: arrays[name] for name in GRIDS if name in arrays}
    if model.passes_positions:
        spans = [] if item is None else [Span(item.first, item)]
        given["position_ids"] = mx.array(positions_of(model, tokens, spans))[:, None]
    if model.reads_whole:
        at = mx.arange(len(tokens))
        given["mask"] = ((at <= at[:, None]) | (at < prompt))[None, None]
    answer = language(ids, cache=cache, **given, **model.given_by_token(ids))
    logits: mx.array = getattr(answer, "logits", answer)
    return logits[0]
