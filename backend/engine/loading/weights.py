"""Loads a checked directory as a model in memory.

Weights are opened lazily, cast, and evaluated one slice at a time. Memory therefore peaks near the
final size, and running streams and a cancelled load wait for one slice only. No weight stays lazy,
because an array that was recorded on one thread cannot be evaluated on another.
"""

from __future__ import annotations

import logging
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass
from functools import partial, wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec

from backend.engine.device import (
    Device,
    dense_budget,
    dequantizes,
    memory_limit,
    return_buffers,
    starts_layers_early,
    weight_type,
)
from backend.engine.errors import Converting, EngineError, InvalidRequest, Unusable, naming
from backend.engine.loading.adapters import Adapter, adapters_digest
from backend.engine.loading.architectures import is_multimodal, model_types
from backend.engine.loading.checkpoint import Checkpoint, missing_files
from backend.engine.loading.earlier_fields import earlier_fields, in_mlx_lm
from backend.engine.loading.saved_weights import with_saved_weights
from backend.engine.loading.stages import Stages
from backend.engine.loading.tokenizer import end_tokens, load_tokenizer
from backend.engine.ranks.rank_info import Member, Value
from backend.engine.settings import Settings, weight_dtype
from backend.engine.units import MIB
from common.context_size import context_of
from common.wording import shown

if TYPE_CHECKING:
    import mlx.core as mx
    from mlx_lm.tokenizer_utils import TokenizerWrapper

    from backend.engine.experts.offload import CachedExperts
    from backend.engine.ranks.sharding import Shard

_log = logging.getLogger(__name__)

_Rest = ParamSpec("_Rest")
OpenModel = Callable[[Path], tuple[Any, dict[str, Any]]]

_FOREIGN = r"its weights include \1 tensors that models of this type do not have in MLX:"
_ABSENT = r"its weights lack \1 of the tensors that models of this type have in MLX:"
_SLICE_BYTES = 32 * MIB
_PROGRESS_SECONDS = 2.0


@dataclass(eq=False, slots=True)
class LoadedModel:
    """A model that is ready to compute, and its properties."""

    name: str
    model: Any
    tokenizer: TokenizerWrapper
    config: dict[str, Any]
    eos_token_ids: frozenset[int]
    context_size: int  # the model's context in tokens, before the user's limit
    weights_bytes: int  # the size of the weights in memory, including the cache of `experts`
    # The type of floating-point weights or of the scales of quantised weights: `bfloat16`, …
    dtype: str
    chat_template: str | None  # None if the model has no template
    adapter_digest: str = ""  # identifies the adapters in the keys of caches; '' if there are none
    # Whether the weights are quantised in the checkpoint and dense in memory.
    dequantized: bool = False
    shard: Shard | None = None  # this rank's part of the model; None if it has the whole model
    # The cache of experts that stay in the checkpoint's files; None if no expert does.
    experts: CachedExperts | None = None

    @property
    def arithmetic(self) -> str:
        """The name of the data type of computations. KV of different names differs."""
        if not self.dequantized:
            return self.dtype
        packed = self.experts is not None and self.experts.packed
        return f"{self.dtype}, dequantised{' except experts' if packed else ''}"

    @property
    def matrix_bytes(self) -> int:
        """The size of an average weight matrix."""
        sizes = [array.nbytes for array in _parameters(self.model) if array.ndim > 1]
        return sum(sizes) // max(len(sizes), 1)

    @property
    def model_type(self) -> str:
        return str(self.config["model_type"])


def _refusing(
    load: Callable[Concatenate[Checkpoint, _Rest], Stages[LoadedModel]],
) -> Callable[Concatenate[Checkpoint, _Rest], Stages[LoadedModel]]:
    """Let a load raise only EngineErrors, which keep nothing of the model in memory."""

    @wraps(load)
    def run(
        checkpoint: Checkpoint, /, *args: _Rest.args, **kwargs: _Rest.kwargs
    ) -> Stages[LoadedModel]:
        refusal = partial(_refusal, checkpoint)
        # A missing package makes mlx-lm exit.
        with naming(checkpoint.name), Converting(refusal, Exception, SystemExit):
            return (yield from load(checkpoint, *args, **kwargs))

    return run


def _refusal(checkpoint: Checkpoint, fault: BaseException) -> EngineError:
    if isinstance(fault, EngineError):
        return fault
    name = shown(checkpoint.name)
    _log.warning("model %s: its weights cannot be loaded", name, exc_info=fault)
    if checkpoint.missing:
        return missing_files(checkpoint.missing)
    reason = reason_of(fault, checkpoint.path)
    if method := _foreign_method(checkpoint.config):
        reason = (
            f"its weights are quantised by {shown(method)}, in a form that cannot be read for this"
            f" model type: use a version that was made for MLX ({reason})"
        )
    elif is_multimodal(checkpoint.config) and not checkpoint.media:
        reason = (
            "only its text part is loaded, whose weights have a form that cannot be read: use a"
            f" version that mlx_lm.convert made ({reason})"
        )
    return Unusable(reason)


@_refusing
def load_model(
    checkpoint: Checkpoint,
    settings: Settings,
    device: Device,
    *,
    dtype: str = "",
    adapters: Sequence[Adapter] = (),
    open_model: OpenModel | None = None,
    member: Member | None = None,
    offloads: bool = False,
) -> Stages[LoadedModel]:
    """Load a checkpoint with its adapters; ends on `engine`. Raises ModelRejected, InvalidRequest.

    open_model: creates the model with lazy weights, and returns the model and its configuration;
        None means mlx-lm's function.
    member: this rank, to load its part of the model; None to load the whole model.
    offloads: whether experts may stay in the files.
    """
    type_ = weight_type(device, weight_dtype(settings, dtype))
    yield "files"
    from mlx_lm.utils import load_model as open_text_model

    from backend.engine.loading.dense import unread_layer
    from backend.engine.ranks.fingerprint import fingerprint, require_alike
    from backend.engine.ranks.sharding import keep_heads, keep_layers, parallelism_of

    tokenizer = load_tokenizer(checkpoint, settings)
    yield "engine"
    reports: Sequence[Value] = ()
    if member is not None:
        report = fingerprint(checkpoint, type_ or "") | {"memory": memory_limit(device, settings)}
        reports = member.agree(report)
        if member.info.rank == 0:  # the other ranks would log the same again
            require_alike(checkpoint.name, member.info, reports)
    if open_model is not None:
        model, config = open_model(checkpoint.path)
    else:
        model, config = open_text_model(
            checkpoint.path,
            lazy=True,
            get_model_classes=mlx_lm_classes,
            trust_remote_code=settings.trust_remote_code,
        )
    if unread := unread_layer(model):
        raise ValueError(f"the weights of {unread} are whole numbers without a scale")
    shard: Shard | None = None
    if member is not None:
        way = parallelism_of(model, checkpoint.name, settings.parallelism, member.info)
        if way == "pipeline":
            memories = [report["memory"] for report in reports]
            shard = keep_layers(model, checkpoint.name, member.info, memories)
    if adapters:
        from backend.engine.loading.adapter_layers import apply_adapters

        apply_adapters(model, adapters)
    if type_:
        cast(model, type_)
    limit = memory_limit(device, settings)
    experts = (yield from _offload(model, checkpoint, settings, limit)) if offloads else None
    dequantized = dequantizes(device, settings.dequantize, type_) and _make_dense(
        model, checkpoint.name, device, limit
    )
    if member is not None and shard is None:
        shard = keep_heads(model, checkpoint.name, config, member.info)
    size = bytes_of(model)
    needed = size + (experts.nbytes + experts.working_bytes if experts else 0)
    if needed > limit:
        raise too_large(needed, limit)
    yield from evaluate(model, size)
    # A layer that starts early may belong to a pass that is never completed. This must not happen
    # between ranks, because the other ranks would wait.
    if starts_layers_early(device) and member is None:
        from backend.engine.loading.early_layers import start_layers_early

        start_layers_early(model)
    return LoadedModel(
        name=checkpoint.name,
        model=model,
        tokenizer=tokenizer,
        config=config,
        eos_token_ids=end_tokens(tokenizer, checkpoint.config, config),
        context_size=context_of(config),
        weights_bytes=size + (experts.nbytes if experts else 0),
        dtype=dtype_of(model),
        chat_template=_template_of(tokenizer),
        adapter_digest=adapters_digest(adapters),
        dequantized=dequantized,
        shard=shard,
        experts=experts,
    )


def _offload(
    model: Any, checkpoint: Checkpoint, settings: Settings, limit: int
) -> Stages[CachedExperts | None]:
    """Leave the experts in the files if the settings or memory require it; ends on `engine`."""
    wanted, size = settings.expert_cache_mib, bytes_of(model)
    if wanted == 0 or (wanted is None and size <= limit):
        return None
    from backend.engine.experts.offload import NotOffloadedError, expert_bytes, offload

    free = max(limit - (size - expert_bytes(model)), 0)
    budget = free * 3 // 4 if wanted is None else wanted * MIB
    try:
        return (yield from offload(model, checkpoint.name, checkpoint.path, budget, free))
    except NotOffloadedError as error:
        why = str(error)
    if wanted is None:
        raise too_large(size, limit, why)
    raise InvalidRequest(
        f"option expert_cache_mib is {wanted}, but {why}: leave expert_cache_mib out, or change it"
    )


@contextmanager
def proving(name: str, what: str) -> Iterator[None]:
    """Refuse a model whose first computation fails, and return the buffers. Raises Unusable.

    what: what the model is tried on, such as `text`.
    """
    try:
        yield
    except EngineError:
        raise
    except Exception as fault:
        _log.warning("model %s: the first %s failed", shown(name), what, exc_info=True)
        raise Unusable(f"it failed on its first {what} ({type(fault).__name__})") from None
    finally:
        return_buffers()


def too_large(size: int, limit: int, why: str = "") -> Unusable:
    """Return the error for weights that do not fit in memory.

    why: why experts cannot stay in the files; '' if that was not tried.
    """
    reason = f", and its experts cannot stay in its files, because {why}" if why else ""
    return Unusable(
        f"its weights take {size // MIB} MiB and MLX may use {limit // MIB} MiB{reason}; raise"
        " memory_limit_mib or use a smaller or more quantised model"
    )


def mlx_lm_classes(config: dict[str, Any]) -> tuple[type[Any], type[Any]]:
    """Return mlx-lm's classes of a model and its arguments; add `earlier_fields` to `config`."""
    from mlx_lm.utils import _get_classes

    config |= in_mlx_lm(config)
    family, arguments = _get_classes(config)
    config |= earlier_fields(config, _names(arguments))
    part = config.get("text_config")
    if isinstance(part, dict):
        # transformers 5 stores each of these fields in one of the two parts.
        if "tie_word_embeddings" in config:
            part.setdefault("tie_word_embeddings", config["tie_word_embeddings"])
        if "vocab_size" in part and "vocab_size" in _names(arguments):
            config.setdefault("vocab_size", part["vocab_size"])
        part |= earlier_fields(part, _names(_of_text(arguments, part)))
    return with_saved_weights(family, config), arguments


def _of_text(arguments: Any, part: dict[str, Any]) -> Any:
    """Return mlx-lm's class for the arguments of the text part; None if it is unknown."""
    from mlx_lm.utils import _get_classes

    module = sys.modules[arguments.__module__]
    for base in module.Model.__mro__:  # a family may be derived from another
        for name in ("TextConfig", "TextArgs", "TextModelArgs"):
            if found := getattr(sys.modules[base.__module__], name, None):
                return found
    if part.get("model_type") in model_types():
        return _get_classes(part)[1]
    texts = [value.ModelArgs for value in vars(module).values() if hasattr(value, "ModelArgs")]
    return texts[0] if len(texts) == 1 else None


def _names(arguments: Any) -> frozenset[str]:
    return frozenset(field.name for field in (fields(arguments) if is_dataclass(arguments) else ()))


def cast(model: Any, name: str) -> None:
    """Cast all floating-point weights, including scales and biases, when they are evaluated.

    Some weights must stay in float32 (a router's correction, a recurrence's decay): a model lists
    them in its `cast_predicate`. The scales of whole experts (nvfp4's `global_scale`) must stay in
    float32 too, because MLX's kernels accept no other type. Packed integers and integer scales are
    not changed.
    """
    import mlx.core as mx
    from mlx.utils import tree_map_with_path

    target = getattr(mx, name)
    may_cast = getattr(model, "cast_predicate", lambda _: True)

    def cast_one(path: str, value: mx.array) -> mx.array:
        floating = mx.issubdtype(value.dtype, mx.floating)
        castable = may_cast(path) and not path.endswith(".global_scale")
        if floating and (target == mx.float32 or castable):
            return value.astype(target)
        return value

    model.update(tree_map_with_path(cast_one, model.parameters()))


def _make_dense(model: Any, name: str, device: Device, limit: int) -> bool:
    """Make quantised weights dense if memory allows, and return whether any became dense."""
    import mlx.core as mx

    from backend.engine.loading.dense import dense_growth, make_dense, quantized_layers

    layers = quantized_layers(model)
    if not layers:
        return False
    dtype = getattr(mx, dtype_of(model))
    size = bytes_of(model) + dense_growth(layers, dtype)
    budget = dense_budget(device, limit, mx.get_active_memory())
    if size > budget:
        _log.info(
            "model %s stays quantised: dense weights need %d MiB, but may use only %d MiB",
            shown(name),
            size // MIB,
            budget // MIB,
        )
        return False
    make_dense(model, layers, dtype)
    return True


def evaluate(model: Any, total: int) -> Stages[None]:
    """Evaluate the weights, one slice in each stage; ends on `engine`."""
    import mlx.core as mx

    started = reported = time.monotonic()
    done = 0
    for part in _slices(model):
        yield "engine"
        mx.eval(part)
        done += sum(array.nbytes for array in part)
        if time.monotonic() - reported >= _PROGRESS_SECONDS:
            reported = time.monotonic()
            _log.info("loading weights: %d of %d MiB", done // MIB, total // MIB)
    if reported != started:
        _log.info("loaded %d MiB of weights in %.1f s", total // MIB, time.monotonic() - started)


def _slices(model: Any) -> Iterator[list[mx.array]]:
    part: list[mx.array] = []
    size = 0
    for array in _arrays(model):
        part.append(array)
        size += array.nbytes
        if size >= _SLICE_BYTES:
            yield part
            part, size = [], 0
    if part:
        yield part


def bytes_of(model: Any) -> int:
    return sum(array.nbytes for array in _parameters(model))


def dtype_of(model: Any) -> str:
    """Return the most common type among the floating-point weights."""
    import mlx.core as mx

    counts: dict[str, int] = {}
    for array in _parameters(model):
        if mx.issubdtype(array.dtype, mx.floating):
            name = str(array.dtype).removeprefix("mlx.core.")
            counts[name] = counts.get(name, 0) + array.size
    return max(counts, key=counts.__getitem__, default="float32")


def _parameters(model: Any) -> list[mx.array]:
    return _arrays(model.parameters())


def _arrays(tree: Any) -> list[mx.array]:
    """Return every array of a tree.

    If the tree is a module, private arrays that are not parameters (such as RoPE frequencies) are
    among them.
    """
    import mlx.core as mx
    from mlx.utils import tree_flatten

    leaves: dict[str, Any] = {}
    tree_flatten(tree, destination=leaves)
    return [leaf for leaf in leaves.values() if isinstance(leaf, mx.array)]


def _template_of(tokenizer: TokenizerWrapper) -> str | None:
    """Return the source of the chat template, or of all templates if there are several.

    Returns '' if code renders chats, and None if the model has no template.
    """
    template = tokenizer.chat_template
    if isinstance(template, str):
        return template
    if isinstance(template, dict):
        return "\n".join(template.values())
    return "" if tokenizer.has_chat_template else None


def _foreign_method(config: dict[str, Any]) -> str:
    """Return the quantisation method if another program than MLX quantised the weights; else ''."""
    text = config.get("text_config")
    for part in (config, text if isinstance(text, dict) else {}):
        described = part.get("quantization_config")
        if isinstance(described, dict) and not part.get("quantization"):
            return str(described.get("quant_method") or "")
    return ""


def reason_of(
    error: BaseException, path: Path | None = None, *, settings_file: str = "config.json"
) -> str:
    """Return the first line of an error's text, and the list after it if the line ends in a colon.

    Paths of this machine are replaced, and so is the word `unimplemented`, from which hosts would
    conclude that the gRPC method does not exist.

    settings_file: the file to name if a value seems to have a wrong type.
    """
    if isinstance(error, SystemExit):
        return "its model type needs a Python package that is not installed"
    if isinstance(error, RecursionError):
        return "one of its JSON files is nested too deeply"
    if isinstance(error, KeyError):
        return f"its files lack {error}"
    text, _, listed = str(error).strip().partition("\n")
    if text.rstrip().endswith(":"):
        text = " ".join([text.rstrip(), *listed.split()])
    if absent := re.search(r"missing \d+ required positional arguments?: (.*)", text):
        text = f"{settings_file} lacks {absent[1]}, which models of this type need in MLX"
    elif isinstance(error, TypeError | AttributeError):
        text = f"a value in {settings_file} may be missing or have the wrong type ({text})"
    if path is not None:
        text = text.replace(str(path), "its folder")
    text = re.sub(r"(?<![\w.])/[\w.+@/-]*/[\w.+@-]+", "a file", text)
    text = re.sub(r"^Received (\d+) parameters not in model:", _FOREIGN, text)
    text = re.sub(r"^Missing (\d+) parameters:", _ABSENT, text)
    text = re.sub("unimplemented", "not implemented", text, flags=re.IGNORECASE)
    return (f"{text[:299]}…" if len(text) > 300 else text) or type(error).__name__
