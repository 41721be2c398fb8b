"""Loads the tokenizer of a checkpoint, as mlx-lm's wrapper with the user's special tokens."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, TypeVar

from backend.engine.errors import InvalidRequest, Unusable
from backend.engine.loading.chat_templates import of_tekken, settle_chats, template_arguments
from backend.engine.loading.checkpoint import Checkpoint
from backend.engine.loading.folder import OF_TOKENIZER, TEMPLATE, first_fault
from backend.engine.prompting.template_limits import limit_templates
from backend.engine.settings import Settings
from common.wording import did_you_mean, shown

_MOST_GROWTH = 1000  # times longer than the text; the normalizers of published models stay below 20
_MOST_UNUSED = 1 << 20  # ids below the highest id that have no token
# The parts of config.json that describe the text model, by family.
_TEXT_PARTS = ("text_config", "llm_config", "language_config", "thinker_config")

_Opened = TypeVar("_Opened")

if TYPE_CHECKING:
    from mlx_lm.tokenizer_utils import TokenizerWrapper


def load_tokenizer(checkpoint: Checkpoint, settings: Settings) -> TokenizerWrapper:
    """Load the tokenizer from local files alone. Raises Unusable, InvalidRequest.

    A special token that the vocabulary lacks is refused, because it would be added under an id that
    the model never writes and cannot read.
    """
    limit_templates()
    extra: dict[str, Any] = {
        "trust_remote_code": settings.trust_remote_code,
        "local_files_only": True,
    }
    try:
        extra |= template_arguments(checkpoint.path, checkpoint.config["model_type"])
        extra |= of_tekken(checkpoint.path)
    except ValueError as fault:
        raise Unusable(
            f"{fault}: put the tokenizer.json of the same model into its folder"
        ) from None
    try:
        tokenizer = _opened(checkpoint, extra)
    except ImportError:
        raise
    except Exception as fault:
        if not settings.trust_remote_code and "trust_remote_code" in str(fault):
            raise Unusable(
                "its tokenizer is Python code of its own, which is not run unless the host sets"
                " trust_remote_code; do so only if you trust its author",
            ) from None
        raise ValueError(_fault_of(checkpoint.path, fault)) from fault
    _require_bounded(tokenizer)
    if overrides := settings.tokenizer_overrides:
        vocabulary = tokenizer.get_vocab()
        for name, token in overrides.items():
            if token not in vocabulary:
                specials = [str(special) for special in tokenizer.all_special_tokens]
                raise InvalidRequest(
                    f"{name} {shown(token)} is not a token of this"
                    f" model{did_you_mean(token, specials)}"
                )
        tokenizer = _opened(checkpoint, extra | overrides)
    remember_no_words(tokenizer)
    return tokenizer


def _opened(checkpoint: Checkpoint, extra: dict[str, Any]) -> TokenizerWrapper:
    from mlx_lm import utils

    open_tokenizer: Callable[..., TokenizerWrapper] = utils.load_tokenizer
    tokenizer = despite_checks(
        checkpoint.config, lambda config: open_tokenizer(checkpoint.path, extra | config)
    )
    settle_chats(tokenizer, checkpoint.path)
    return tokenizer


def despite_checks(
    config: Mapping[str, Any], attempt: Callable[[dict[str, Any]], _Opened]
) -> _Opened:
    """Open a tokenizer or processor with transformers, even if transformers refuses config.json.

    transformers checks all of config.json, and refuses some values of published models that MLX
    accepts (Llama 4's attn_temperature_tuning of 4, EXAONE 4's pattern "LLLG"). A tokenizer needs
    only two keys, so if the first attempt fails, a second attempt gets only these two.

    attempt: opens the tokenizer, with additional arguments for `from_pretrained`.

    Raises what the first attempt raised.
    """
    try:
        return attempt({})
    except ImportError:
        raise
    except Exception as fault:
        needed = {key: config.get(key) for key in ("model_type", "tokenizer_class")}
        try:
            return attempt({"config": SimpleNamespace(**needed)})
        except Exception:
            raise fault from None


def remember_no_words(tokenizer: Any) -> None:
    """Switch off the cache of words in a tokenizer that has not encoded anything yet.

    The library never frees the part of the cache that belongs to a thread, so every load of a model
    would leave some KiB in memory. Encoding a prompt without the cache takes about as long.
    """
    network = getattr(getattr(tokenizer, "backend_tokenizer", None), "model", None)
    resize = getattr(network, "_resize_cache", None)
    if resize is not None:
        resize(0)


def _fault_of(folder: Path, fault: Exception) -> str:
    """Return a clause that names the file because of which a tokenizer could not be opened."""
    from tokenizers import Tokenizer

    file = folder / "tokenizer.json"
    if why := first_fault(folder, (file.name, *OF_TOKENIZER, TEMPLATE)):
        return why
    if file.is_file():
        try:
            Tokenizer.from_file(str(file))
        except Exception as error:
            return f"{file.name} is not a valid tokenizer: {error}"
    names = [name for name in OF_TOKENIZER if (folder / name).is_file()]
    return f"a value in {' or '.join(names) or 'its vocabulary'} is missing or wrong ({fault})"


def _require_bounded(tokenizer: TokenizerWrapper) -> None:
    """Refuse a tokenizer that can fill the memory.

    Tables have an entry for every token id up to the highest, and a normalizer may turn a short
    text into a long text.
    """
    vocabulary = tokenizer.get_vocab()
    highest = max(vocabulary.values(), default=0)
    if highest > len(vocabulary) + _MOST_UNUSED:
        raise Unusable(
            f"its tokenizer has {len(vocabulary)} tokens, one of them with the id {highest}"
        )
    normalizer = getattr(getattr(tokenizer, "backend_tokenizer", None), "normalizer", None)
    if normalizer is None:
        return
    growth = _growth(json.loads(normalizer.__getstate__()))
    if growth > _MOST_GROWTH:
        raise Unusable(
            f"the normalizer in its tokenizer.json can make a text {growth:.3g} times longer, and"
            f" {_MOST_GROWTH} is the most that is allowed",
        )


def _growth(normalizer: dict[str, Any]) -> float:
    """Return how many times longer, in bytes, a normalizer may make a text.

    The figure is an upper bound. Unicode's normal forms, which lengthen a text at most 18 times,
    are left out.
    """
    match normalizer:
        case {"type": "Sequence", "normalizers": [*parts]}:
            return math.prod(map(_growth, parts))
        case {"type": "Replace", "pattern": {"String": str(pattern)}, "content": str(content)}:
            return max(len(content.encode()) / max(len(pattern.encode()), 1), 1)
        case {"type": "Replace", "content": str(added)} | {
            "type": "Prepend",
            "prepend": str(added),
        }:
            return 1 + len(added.encode())
        case _:
            return 1


def end_tokens(tokenizer: TokenizerWrapper, *configs: dict[str, Any]) -> frozenset[int]:
    """Return every token that ends an answer, according to the tokenizer and all configurations.

    The files often disagree: one may name the end of a text, and another the end of a turn.
    """
    found = {int(token) for token in tokenizer.eos_token_ids}
    for name in ("eos_token_id", "eos_token_ids"):
        found |= _ids(tokenizer.init_kwargs.get(name))
    for config in configs:
        found |= _ends_of(config)
    return frozenset(found)


def _ends_of(config: Mapping[str, Any]) -> set[int]:
    found = _ids(config.get("eos_token_id"))
    parts = (config.get(name) for name in _TEXT_PARTS)
    return found.union(*(_ends_of(part) for part in parts if isinstance(part, dict)))


def _ids(value: object) -> set[int]:
    """Return the token ids in a value: numbers, or numbers in strings as some tools write them."""
    values = value if isinstance(value, list) else [value]
    texts = [str(item) for item in values if isinstance(item, int | float | str)]
    return {int(match[1]) for text in texts if (match := re.fullmatch(r"(\d{1,18})(\.0)?", text))}
