"""Small models with an EAGLE-3 or DFlash drafter, trained together, as checkpoints of the hub."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import mlx_lm
from mlx.utils import tree_flatten

from tests.engine.drafting.drafter_training import write_drafter
from tests.engine.drafting.heads import text
from tests.engine.loading_models import write_model, write_weights
from tests.engine.random_models import CONFIGS, VOCABULARY

DRAFT_VOCABULARY = 80  # of EAGLE-3: tokens 1 to 80
LAYERS = 3
BLOCK = 6
_SIZE = 32
_TEXTS, _LENGTH = 12, 24
_STEPS = {"eagle": 90, "speculator": 90, "dflash": 160}
_LAYER: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": _SIZE,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "rms_norm_eps": 1e-5,
    "num_hidden_layers": 1,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 2048,
    "rope_theta": 10000.0,
}
# A configuration as SpecForge and the makers of EAGLE-3 write it.
EAGLE: dict[str, Any] = _LAYER | {
    "architectures": ["LlamaForCausalLMEagle3"],
    "draft_vocab_size": DRAFT_VOCABULARY,
    "tie_word_embeddings": False,
    "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 0, 1], "use_aux_hidden_state": True},
}
# As Speculators writes it.
SPECULATOR: dict[str, Any] = {
    "architectures": ["Eagle3Speculator"],
    "speculators_model_type": "eagle3",
    "speculators_config": {"algorithm": "eagle3", "proposal_methods": [{"speculative_tokens": 3}]},
    "draft_vocab_size": DRAFT_VOCABULARY,
    "target_hidden_size": None,
    "norm_before_residual": True,
    "embed_requires_grad": True,
    "eagle_aux_hidden_state_layer_ids": [0, 1, 2],
    "tie_word_embeddings": False,
    "transformer_layer_config": _LAYER,
}
DFLASH: dict[str, Any] = _LAYER | {
    "architectures": ["DFlashDraftModel"],
    "model_type": "qwen3",
    "num_hidden_layers": 2,
    "block_size": BLOCK,
    "num_target_layers": LAYERS,
    "layer_types": ["sliding_attention", "full_attention"],
    "sliding_window": 16,
    "dflash_config": {"mask_token_id": 0, "target_layer_ids": [0, 1]},
}
FORMS = {"eagle": EAGLE, "speculator": SPECULATOR, "dflash": DFLASH}
_FOLDER = TemporaryDirectory(prefix="drafters-")  # removed when the process ends


@cache
def drafter_of(kind: str, form: str) -> Path:
    """A checkpoint of a drafter beside that of its model (`model`), trained once in a process."""
    directory = Path(_FOLDER.name) / f"{kind}-{form}"
    path = directory / "model"
    write_model(path, dtype="float32", **CONFIGS[kind] | {"num_hidden_layers": LAYERS})
    model = mlx_lm.load(str(path))[0]
    drafter = directory / "drafter"
    write_drafter(
        drafter,
        model,
        FORMS[form],
        lambda dice: [text(dice, _LENGTH) for _ in range(_TEXTS)],
        _STEPS[form],
    )
    write_weights(path, dict(tree_flatten(model.parameters())))
    return drafter
