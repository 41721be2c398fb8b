"""ModelOptions → LoadRequest, with a place for every field of the message.

The host fills dozens of fields for engines of all kinds (contract 2.2), so most arrive with a
default and mean nothing here; those must never fail a load. A field whose loss would change the
answers is refused by value instead of being dropped. A test walks the descriptor: a field that is
neither read nor in a table fails it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from backend.engine.errors import InvalidRequest
from backend.engine.given_settings import parse_settings
from backend.engine.load_request import LoadRequest
from backend.engine.loading.adapters import AdapterRequest
from backend.rpc.neutral import Refused, empty, one_of, require_neutral, word_of
from wire import backend_pb2 as pb

_LATER = "this version does not apply it"
_ROPE = "positions are as the checkpoint's config.json says"

REFUSED: Mapping[str, Refused] = {
    "LoraBase": Refused(
        empty, "adapters are applied to the weights of the model itself", "leave it empty"
    ),
    "MMProj": Refused(
        empty, "a vision model for MLX has its vision tower among its weights", "remove mmproj"
    ),
    "Quantization": Refused(
        empty, "an MLX checkpoint carries its own quantisation", "choose a quantised checkpoint"
    ),
    "LoadFormat": Refused(
        word_of("auto", "safetensors"), "only safetensors are read", "leave it empty"
    ),
    "Tokenizer": Refused(empty, "the checkpoint's own tokenizer is used", "leave it empty"),
    "Overrides": Refused(empty, _LATER, "edit the checkpoint's config.json"),
    "RopeScaling": Refused(word_of("none"), _ROPE, "leave it empty"),
    "RopeFreqBase": Refused(one_of(0), _ROPE, "send 0"),
    "RopeFreqScale": Refused(one_of(0, 1), _ROPE, "send 0"),
    "YarnExtFactor": Refused(one_of(0, -1), _ROPE, "send 0"),
    "YarnAttnFactor": Refused(one_of(0, 1), _ROPE, "send 0"),
    "YarnBetaFast": Refused(one_of(0, 32), _ROPE, "send 0"),
    "YarnBetaSlow": Refused(one_of(0, 1), _ROPE, "send 0"),
    "TensorParallelSize": Refused(one_of(0, 1), "one process serves the model", "send 0 or 1"),
}

_DEVICE = "MLX places memory and work itself"
_CHECKPOINT = "the checkpoint's config.json says it"
_IMAGES = "for models that make images"

UNUSED: Mapping[str, str] = {
    "Seed": "every request brings its own",
    "NBatch": "prefill is cut by the prefill_chunk setting",
    "Threads": _DEVICE,
    "F16Memory": "DType, or the platform, decides the type of weights and cache",
    "MLock": _DEVICE,
    "MMap": _DEVICE,
    "NUMA": _DEVICE,
    "LowVRAM": _DEVICE,
    "NGPULayers": _DEVICE,
    "MainGPU": _DEVICE,
    "TensorSplit": _DEVICE,
    "NoMulMatQ": _DEVICE,
    "NoKVOffload": _DEVICE,
    "FlashAttention": "MLX chooses its attention kernels itself",
    "EnforceEager": _DEVICE,
    "EnableScore": "Score is always served",
    "SwapSpace": _DEVICE,
    "GPUMemoryUtilization": "the memory_limit_mib setting bounds memory",
    "RMSNormEps": _CHECKPOINT,
    "NGQA": _CHECKPOINT,
    "GrammarTriggers": "start a grammar, and requests with a grammar are refused",
    "DisableLogStatus": "MLX_BACKEND_LOG sets the log level",
    "VocabOnly": "no host sets it",
    "Type": "names a class of another engine; the checkpoint says what it is",
    "PipelineType": _IMAGES,
    "SchedulerType": _IMAGES,
    "CUDA": _IMAGES,
    "CFGScale": _IMAGES,
    "IMG2IMG": _IMAGES,
    "CLIPModel": _IMAGES,
    "CLIPSubfolder": _IMAGES,
    "CLIPSkip": _IMAGES,
    "ControlNet": _IMAGES,
    "AudioPath": "for models that make sound",
    "Proxy": "for LocalAI's cloud proxy",
}


def load_request(options: pb.ModelOptions) -> tuple[LoadRequest, list[str]]:
    """The validated request, and warnings for the log. Raises InvalidRequest."""
    require_neutral(options, REFUSED)
    settings, warnings = parse_settings(list(options.Options), options.EngineArgs)
    trusted: bool = settings.get("trust_remote_code", options.TrustRemoteCode)
    request = LoadRequest(
        model=_reference("Model", options.Model),
        model_file=_reference("ModelFile", options.ModelFile),
        model_path=_reference("ModelPath", options.ModelPath),
        context_size=_context_size(options.ContextSize, options.MaxModelLen),
        dtype=options.DType,
        trust_remote_code=trusted,
        cache_type_key=options.CacheTypeKey,
        cache_type_value=options.CacheTypeValue,
        adapters=_adapters(options),
        draft_model=_reference("DraftModel", options.DraftModel),
        embeddings=options.Embeddings,
        reranking=options.Reranking,
        most_images=options.LimitImagePerPrompt,
        most_audios=options.LimitAudioPerPrompt,
        most_videos=options.LimitVideoPerPrompt,
        settings=settings,
    )
    if not request.model and not request.model_file:
        raise InvalidRequest("Model is empty: name a hub repository or a model directory")
    return request, warnings


def _reference(name: str, value: str) -> str:
    if "\0" in value:
        raise InvalidRequest(f"{name} holds a NUL character: no path or repository has one")
    return value


def _adapters(options: pb.ModelOptions) -> tuple[AdapterRequest, ...]:
    """LoraAdapter with its LoraScale, then LoraAdapters with their LoraScales.

    On the wire a scale that was not given is 0, so 0 means 1: the adapter at its own strength.
    """
    names, scales = list(options.LoraAdapters), list(options.LoraScales)
    if len(scales) > len(names):
        raise InvalidRequest(
            f"LoraScales has {len(scales)} entries, and LoraAdapters {len(names)}: send one scale"
            " for each adapter, or fewer"
        )
    scales += [0.0] * (len(names) - len(scales))
    adapters = [_adapter("LoraAdapters", *pair) for pair in zip(names, scales, strict=True)]
    if options.LoraAdapter:
        adapters.insert(0, _adapter("LoraAdapter", options.LoraAdapter, options.LoraScale))
    elif options.LoraScale not in (0, 1):
        raise InvalidRequest(
            f"LoraScale is {options.LoraScale:g}, but LoraAdapter is empty: name the adapter, or"
            " use LoraScales for LoraAdapters"
        )
    return tuple(adapters)


def _adapter(field: str, reference: str, scale: float) -> AdapterRequest:
    if not reference.strip():
        raise InvalidRequest(f"{field} names an empty adapter: remove it")
    if not math.isfinite(scale) or scale < 0:
        raise InvalidRequest(
            f"{field} has an adapter with the scale {scale:g}: send a number above 0, or 0 for 1"
        )
    return AdapterRequest(_reference(field, reference), scale or 1.0)


def _context_size(context_size: int, max_model_len: int) -> int:
    """Both bound prompt plus output; the smaller one that is set counts."""
    for name, value in (("ContextSize", context_size), ("MaxModelLen", max_model_len)):
        if value < 0:
            raise InvalidRequest(
                f"{name} is {value}: send a count of tokens, or 0 for the model's own maximum"
            )
    return min((size for size in (context_size, max_model_len) if size), default=0)
