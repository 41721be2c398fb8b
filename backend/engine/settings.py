"""Our own settings of a model: one table, from which values are parsed and the docs are written.

They arrive as `options:` entries or as the JSON object of EngineArgs, which wins. A value that
cannot work fails the load at once, with a sentence, instead of every request after it. Nothing
here needs MLX, so the servicer can check settings before the engine is woken.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields
from typing import Any

from backend.engine.errors import InvalidRequest
from backend.engine.request import Extras
from common.options import Option, did_you_mean, parse_options, shown

_NAMES = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}


@dataclass(frozen=True, slots=True)
class Rule:
    """What a setting accepts. `auto`: the word stands for None, the device's own choice."""

    kind: type
    meaning: str
    minimum: float = 0
    maximum: float = 0
    auto: bool = False
    choices: tuple[str, ...] = ()

    @property
    def expects(self) -> str:
        if self.choices:
            return "one of " + ", ".join(choice or '""' for choice in self.choices)
        words = _NAMES[self.kind]
        if self.kind in (int, float):
            words = f"{words} from {self.minimum} to {self.maximum}"
        return f"{words}, or auto" if self.auto else words


def _number(default: int | None, minimum: int, maximum: int, meaning: str) -> Any:
    rule = Rule(int, meaning, minimum, maximum, auto=default is None)
    return field(default=default, metadata={"rule": rule})


def _share(default: float, meaning: str) -> Any:
    return field(default=default, metadata={"rule": Rule(float, meaning, 0, 1)})


def _flag(default: bool | None, meaning: str) -> Any:
    rule = Rule(bool, meaning, auto=default is None)
    return field(default=default, metadata={"rule": rule})


def _text(default: str, meaning: str, choices: tuple[str, ...] = ()) -> Any:
    return field(default=default, metadata={"rule": Rule(str, meaning, choices=choices)})


_MIB = 1 << 24  # 16 TiB in MiB: above any machine, below what overflows a byte count


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The settings of one loaded model. An empty text means: not given."""

    parallel: int = _number(16, 1, 256, "Generations that are decoded together.")
    max_queue: int = _number(
        256, 0, 100_000, "Requests that may wait for a place; further ones are refused."
    )
    prefill_chunk: int | None = _number(
        None, 16, 8192, "Most prompt tokens in one prefill step; auto suits the device."
    )
    stall_ms: int = _number(
        250, 1, 60_000, "Longest pause, in ms, that a prefill step should cause in running streams."
    )
    prompt_cache_mib: int | None = _number(
        None,
        0,
        _MIB,
        "Memory in MiB for the KV of earlier prompts; 0 turns it off, auto is a share of the"
        " memory.",
    )
    kv_bits: int = _number(
        0,
        0,
        8,
        "Bits of a value in the KV cache: 2, 3, 4, 5, 6 or 8; 0 keeps it as the model computes.",
    )
    kv_group_size: int = _number(
        0,
        0,
        128,
        "Values that share a scale in a quantised KV cache: 32, 64 or 128; 0 suits the model.",
    )
    max_cache_entries: int = _number(
        0, 0, 1_000_000, "Most prompts kept in the prompt cache; 0 means bounded by memory alone."
    )
    prompt_cache_dir: str = _text(
        "",
        "Folder in which the KV of earlier prompts survives a restart, as an absolute path; several"
        " models may share it. Empty turns it off.",
    )
    prompt_cache_disk_mib: int = _number(
        4096,
        1,
        _MIB,
        "Most MiB of all prompt caches in prompt_cache_dir, and of a file that a request names.",
    )
    memory_limit_mib: int | None = _number(
        None, 0, _MIB, "Memory in MiB that MLX may use in all; 0 or auto suits the device."
    )
    max_tokens: int = _number(
        0,
        0,
        100_000_000,
        "Output tokens of a request that sets no limit; 0 means up to the end of the context.",
    )
    min_tokens: int = _number(
        0,
        0,
        1 << 20,
        "Tokens before which an answer cannot end; a request may set its own (`mlx.min_tokens`).",
    )
    xtc_probability: float = _share(
        0.0,
        "Chance per token that XTC sampling excludes all likely tokens but the last; a request may"
        " set its own (`mlx.xtc_probability`).",
    )
    xtc_threshold: float = _share(
        0.1,
        "Share of probability from which XTC takes a token for likely; a request may set its own"
        " (`mlx.xtc_threshold`).",
    )
    grammar_type: str = _text(
        "auto",
        "How a request's Grammar is read; auto takes a JSON object for a JSON schema, and other"
        " text for GBNF; a request may set its own (`mlx.grammar_type`).",
        ("auto", "gbnf", "json_schema", "lark", "regex"),
    )
    parallel_tool_calls: bool = _flag(
        True,
        "Whether a demanded tool call may be several; a request may set its own"
        " (`mlx.parallel_tool_calls`).",
    )
    n_draft: int = _number(
        8,
        1,
        64,
        "Most tokens guessed at a time where a model drafts; a request may set its own (`NDraft`).",
    )
    prompt_lookup: bool = _flag(
        False,
        "Whether tokens are guessed from earlier text of the same request, which is faster where an"
        " answer quotes or repeats and changes no output.",
    )
    dtype: str = _text(
        "auto",
        "Type of the weights in memory; auto casts to float32 on a CPU and keeps the checkpoint's"
        " own type on a GPU.",
        ("auto", "float32", "float16", "bfloat16"),
    )
    trust_remote_code: bool = _flag(
        False, "Whether Python files that come with the checkpoint may be run."
    )
    allow_media_paths: bool = _flag(
        False,
        "Whether an image or a sound of a request may be an absolute path of a file here; only for"
        " hosts that stage files.",
    )
    max_image_pixels: int = _number(
        33_554_432,
        1,
        89_478_485,
        "Most pixels of an image, before it is decoded; all images of a request may have four times"
        " as many.",
    )
    max_audio_seconds: int = _number(
        600, 1, 7200, "Most seconds of all sounds of a request together."
    )
    max_media_mib: int = _number(64, 1, 1024, "Most MiB of an image or sound, as its file is.")
    vision_cache_mib: int = _number(
        512,
        0,
        _MIB,
        "Memory in MiB for images and sounds seen before: half for what the model made of them,"
        " half for what its processor did; 0 turns it off.",
    )
    revision: str = _text("", "Branch, tag or commit of a hub repository; empty means main.")
    type: str = _text(
        "",
        "Kind of model, in place of what the checkpoint says: text (of a vision-language model its"
        " text part alone), vision, embedding, rerank or token_classify.",
        ("", "text", "vision", "embedding", "rerank", "token_classify"),
    )
    pooling: str = _text(
        "",
        "How token vectors become the vector of Embedding: none gives them as they are; empty means"
        " what the checkpoint says, and last for a model that generates.",
        ("", "mean", "last", "cls", "max", "none"),
    )
    normalize: bool | None = _flag(
        None,
        "Whether vectors of Embedding are scaled to length 1; auto means what the checkpoint says,"
        " and true for a model that generates.",
    )
    tool_parser: str = _text("", "Format of tool calls; empty means detected from the model.")
    reasoning_parser: str = _text("", "Format of reasoning; empty means detected from the model.")
    eos_token: str = _text("", "End-of-sequence token in place of the tokenizer's own.")
    bos_token: str = _text("", "Beginning-of-sequence token in place of the tokenizer's own.")
    pad_token: str = _text("", "Padding token in place of the tokenizer's own.")
    unk_token: str = _text("", "Unknown-word token in place of the tokenizer's own.")
    sep_token: str = _text("", "Separator token in place of the tokenizer's own.")
    cls_token: str = _text("", "Classifier token in place of the tokenizer's own.")
    mask_token: str = _text("", "Mask token in place of the tokenizer's own.")

    @classmethod
    def from_values(cls, values: Mapping[str, Any]) -> Settings:
        """Settings from typed values; the rest have their defaults. Raises InvalidRequest."""
        for name in values:
            if name not in RULES:
                raise InvalidRequest(_unknown("setting", name))
        return cls(**{name: _checked("setting", name, value) for name, value in values.items()})

    @property
    def extras(self) -> Extras:
        """The defaults of what requests have no field for."""
        return Extras(
            min_tokens=self.min_tokens,
            xtc_probability=self.xtc_probability,
            xtc_threshold=self.xtc_threshold,
            grammar_type=self.grammar_type,
            parallel_tool_calls=self.parallel_tool_calls,
        )

    @property
    def tokenizer_overrides(self) -> dict[str, str]:
        """The special tokens that were given, by the tokenizer's name for them."""
        return {name: token for name in SPECIAL_TOKENS if (token := getattr(self, name))}


RULES: dict[str, Rule] = {entry.name: entry.metadata["rule"] for entry in fields(Settings)}
SPECIAL_TOKENS = (
    "eos_token",
    "bos_token",
    "pad_token",
    "unk_token",
    "sep_token",
    "cls_token",
    "mask_token",
)

_PER_REQUEST = "has no effect here: the host sends this value with every request"
NOT_HONOURED: dict[str, str] = dict.fromkeys(
    (
        "temperature",
        "temp",
        "top_p",
        "min_p",
        "top_k",
        "seed",
        "repetition_penalty",
        "presence_penalty",
        "frequency_penalty",
    ),
    _PER_REQUEST,
) | {"quantized_kv_start": "has no effect here: the KV cache is quantised from its first token"}
REFUSED: dict[str, str] = {
    "max_kv_size": "is not supported: a rotating context forgets the start of the prompt without"
    " saying so; set context_size to bound memory"
}


def parse_settings(options: Sequence[str], engine_args: str) -> tuple[dict[str, Any], list[str]]:
    """The settings that were given, typed and checked, and warnings for the log.

    An unknown option is a warning, since hosts add options of their own; an unknown key in
    EngineArgs, and a wrong value in either, raises InvalidRequest.
    """
    parsed = parse_options(options)
    values: dict[str, Any] = {}
    warnings = list(parsed.warnings)
    for name, option in parsed.options.items():
        if name in RULES:
            values[name] = _checked("option", name, _of_option(RULES[name], option))
        elif name in REFUSED:
            raise InvalidRequest(f"option {name} {REFUSED[name]}")
        elif name in NOT_HONOURED:
            warnings.append(f"option {name} {NOT_HONOURED[name]}")
        else:
            warnings.append(_unknown("option", name))
    values.update(_parse_engine_args(engine_args))
    return values, warnings


def weight_dtype(settings: Settings, field_value: str) -> str:
    """The wanted dtype: the setting, else the DType field of the load request, else `auto`.

    The field is meant for several engines, so their names for the same types are taken too.
    """
    if settings.dtype != "auto":
        return settings.dtype
    aliases = {"": "auto", "half": "float16", "float": "float32", "fp16": "float16"}
    aliases |= {"bf16": "bfloat16", "fp32": "float32", "f16": "float16", "f32": "float32"}
    name = field_value.strip().lower()
    name = aliases.get(name, name)
    if name not in RULES["dtype"].choices:
        raise InvalidRequest(
            f"DType must be {RULES['dtype'].expects}, but it is {shown(field_value)}"
        )
    return name


def render_table() -> str:
    """The table of settings in Markdown, for docs/options.md."""
    rows = ["| option | value | default | meaning |", "|---|---|---|---|"]
    for entry in fields(Settings):
        rule: Rule = entry.metadata["rule"]
        rows.append(
            f"| `{entry.name}` | {rule.expects} | {_shown_default(entry)} | {rule.meaning} |"
        )
    return "\n".join(rows) + "\n"


def _shown_default(entry: Field[Any]) -> str:
    assert entry.default is not MISSING
    if entry.default is None:
        return "auto"
    if isinstance(entry.default, bool):
        return str(entry.default).lower()
    return str(entry.default)


def _of_option(rule: Rule, option: Option) -> Any:
    """An option's value in the setting's own type, where its looks alone decided otherwise."""
    if rule.kind is str:
        return option.text
    if rule.auto and option.text.lower() == "auto":
        return None
    value = option.value
    if rule.kind is int and isinstance(value, float) and value.is_integer():
        return int(value)
    return value


def _checked(source: str, name: str, value: Any) -> Any:
    rule = RULES[name]
    if value is None and rule.auto:
        return None
    if rule.kind is float and type(value) is int:
        value = float(value)
    good = type(value) is rule.kind
    if good and rule.choices:
        value = value.strip().lower()
        good = value in rule.choices
    elif good and rule.kind in (int, float):
        good = rule.minimum <= value <= rule.maximum
    if good:
        return value
    raise InvalidRequest(f"{source} {name} must be {rule.expects}, but it is {shown(value)}")


def _parse_engine_args(text: str) -> dict[str, Any]:
    if not text.strip():
        return {}
    try:
        given = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"EngineArgs is not valid JSON: {error}") from None
    if not isinstance(given, dict):
        raise InvalidRequest(
            f"EngineArgs must be a JSON object of settings, but it is {shown(given)}"
        )
    values: dict[str, Any] = {}
    for name, value in given.items():
        source = "EngineArgs key"
        if name in RULES:
            automatic = RULES[name].auto and value == "auto"
            values[name] = _checked(source, name, None if automatic else value)
        elif why := REFUSED.get(name) or NOT_HONOURED.get(name):
            raise InvalidRequest(f"{source} {name} {why}; remove it")
        else:
            raise InvalidRequest(_unknown(source, name))
    return values


def _unknown(source: str, name: str) -> str:
    hint = did_you_mean(name, RULES)
    return f"unknown {source} {shown(name)}{hint or '; docs/options.md lists all settings'}"


if __name__ == "__main__":
    print(render_table(), end="")
