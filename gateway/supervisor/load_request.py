"""The LoadModel message for a model's file."""

from __future__ import annotations

import json
from pathlib import Path

from gateway.models.config import ModelConfig
from wire import backend_pb2 as pb

# Keys of the file that are passed on unchanged. The protocol has them in camel case, except those
# of `_WIRE`.
_SAME = """
    context_size max_model_len overrides type dtype quantization load_format trust_remote_code
    embeddings reranking mmproj cache_type_k cache_type_v rope_scaling yarn_ext_factor
    yarn_attn_factor yarn_beta_fast yarn_beta_slow tensor_parallel_size lora_adapter lora_base
    lora_scale lora_scales
""".split()
_WIRE = {
    "dtype": "DType",
    "mmproj": "MMProj",
    "cache_type_k": "CacheTypeKey",
    "cache_type_v": "CacheTypeValue",
}


def load_request(config: ModelConfig, models_dir: Path, draft: str = "") -> pb.ModelOptions:
    """Return the message for a model, with one of its `draft_models` if it is named."""
    draft_model = draft or config.draft_model
    own = [f"n_draft:{config.n_draft}"] if config.n_draft else []
    if config.adapters:
        own.append(f"adapters:{', '.join(map('='.join, config.adapters.items()))}")
    return pb.ModelOptions(
        Model=config.parameters.model,
        ModelFile=str(models_dir / config.parameters.model),
        ModelPath=str(models_dir),
        # The last option of a key counts, so the file's own options come last.
        Options=[*own, *config.options],
        EngineArgs=json.dumps(config.engine_args) if config.engine_args else "",
        LoraAdapters=config.lora_adapters,
        DraftModel=_local(models_dir, draft_model),
        Tokenizer=config.parameters.tokenizer,
        RopeFreqBase=config.parameters.rope_freq_base,
        RopeFreqScale=config.parameters.rope_freq_scale,
        **{_WIRE.get(key, key.title().replace("_", "")): getattr(config, key) for key in _SAME},
    )


def _local(models_dir: Path, reference: str) -> str:
    """Return a folder under the models folder as a path; anything else unchanged."""
    folder = models_dir / reference
    return str(folder) if reference and folder.exists() else reference
