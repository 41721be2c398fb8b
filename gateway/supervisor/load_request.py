"""LoadModel as a model's file asks for it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from gateway.models.config import ModelConfig
from wire import backend_pb2 as pb

# Key of the file → field of the wire, for what is passed on as it is.
_SAME: Mapping[str, str] = {
    "context_size": "ContextSize",
    "max_model_len": "MaxModelLen",
    "overrides": "Overrides",
    "type": "Type",
    "dtype": "DType",
    "quantization": "Quantization",
    "load_format": "LoadFormat",
    "trust_remote_code": "TrustRemoteCode",
    "embeddings": "Embeddings",
    "reranking": "Reranking",
    "mmproj": "MMProj",
    "cache_type_k": "CacheTypeKey",
    "cache_type_v": "CacheTypeValue",
    "rope_scaling": "RopeScaling",
    "yarn_ext_factor": "YarnExtFactor",
    "yarn_attn_factor": "YarnAttnFactor",
    "yarn_beta_fast": "YarnBetaFast",
    "yarn_beta_slow": "YarnBetaSlow",
    "tensor_parallel_size": "TensorParallelSize",
    "lora_adapter": "LoraAdapter",
    "lora_base": "LoraBase",
    "lora_scale": "LoraScale",
    "lora_scales": "LoraScales",
}


def load_request(
    config: ModelConfig, models_dir: Path, adapter: str = "", draft: str = ""
) -> pb.ModelOptions:
    """The message for a model, with one of its `adapters` and `draft_models` if those are named."""
    draft_model = draft or config.draft_model
    return pb.ModelOptions(
        Model=config.parameters.model,
        ModelFile=str(models_dir / config.parameters.model),
        ModelPath=str(models_dir),
        Options=_options(config),
        EngineArgs=json.dumps(config.engine_args) if config.engine_args else "",
        LoraAdapters=[*config.lora_adapters, *([config.adapters[adapter]] if adapter else [])],
        DraftModel=_local(models_dir, draft_model),
        Tokenizer=config.parameters.tokenizer,
        RopeFreqBase=config.parameters.rope_freq_base,
        RopeFreqScale=config.parameters.rope_freq_scale,
        **{field: getattr(config, key) for key, field in _SAME.items()},
    )


def _options(config: ModelConfig) -> list[str]:
    """The last entry of a key counts, so the file's own options stay the last word."""
    return [f"n_draft:{config.n_draft}", *config.options] if config.n_draft else config.options


def _local(models_dir: Path, reference: str) -> str:
    """A folder under the models folder by its path; anything else as it is written."""
    folder = models_dir / reference
    return str(folder) if reference and folder.exists() else reference
