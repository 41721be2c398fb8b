"""The settings of a model: one table, by which values are checked and from which docs are made.

Nothing here needs MLX, so the servicer checks settings before the engine has to import it.
`python -m backend.engine.settings` prints the table of docs/options.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from backend.engine.errors import InvalidRequest
from backend.engine.request import Extras
from backend.engine.setting_rule import Rule, flag, number, text
from common.wording import did_you_mean, shown

_MIB = 1 << 24  # 16 TiB in MiB: above any machine, below what overflows a byte count


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The settings of one loaded model. An empty text means: not given."""

    parallel: int = number(16, 1, 256, "Generations that are decoded together.")
    max_queue: int = number(
        256, 0, 100_000, "Requests that may wait for a slot; further ones are refused."
    )
    prefill_chunk: int | None = number(
        None, 16, 8192, "Most prompt tokens in one prefill step; auto suits the device."
    )
    stall_ms: int = number(
        250, 1, 60_000, "Longest pause, in ms, that a prefill step should cause in running streams."
    )
    stream_interval_ms: int = number(
        10,
        0,
        1000,
        "Time, in ms, in which a fast model's tokens are gathered into one Reply of a stream; the"
        " first text of an answer and its end never wait. 0 sends each token by itself.",
    )
    step_timeout: int | None = number(
        None,
        0,
        86_400,
        "Seconds after which an engine step that has not ended counts as hung, and the process"
        " exits; 0 means never, auto is 600 on a GPU and 3600 on a CPU.",
    )
    prompt_cache_mib: int | None = number(
        None,
        0,
        _MIB,
        "Memory in MiB for the KV of earlier prompts; 0 turns it off, auto is a share of the"
        " memory.",
    )
    kv_bits: int = number(
        0,
        0,
        8,
        "Bits of a value in the KV cache: 2, 3, 4, 5, 6 or 8; 0 keeps it as the model computes.",
    )
    kv_group_size: int = number(
        0,
        0,
        128,
        "Values that share a scale in a quantised KV cache: 32, 64 or 128; 0 suits the model.",
    )
    max_cache_entries: int = number(
        0, 0, 1_000_000, "Most prompts kept in the prompt cache; 0 means bounded by memory alone."
    )
    prompt_cache_dir: str = text(
        "",
        "Folder in which the KV of earlier prompts survives a restart, as an absolute path; several"
        " models may share it. Empty turns it off.",
    )
    prompt_cache_disk_mib: int = number(
        4096,
        1,
        _MIB,
        "Most MiB of all prompt caches in prompt_cache_dir, and of a file that a request names.",
    )
    memory_limit_mib: int | None = number(
        None, 0, _MIB, "Memory in MiB that MLX may use in all; 0 or auto suits the device."
    )
    repetition_guard: int = number(
        0,
        0,
        100_000,
        "Number of tokens that only repeat the stretch before them after which an answer ends with"
        " `stop` and the trailer `mlx-ended-by: repetition`; 0 turns the guard off.",
    )
    max_tokens: int = number(
        0,
        0,
        100_000_000,
        "Output tokens of a request that sets no limit; 0 means up to the end of the context.",
    )
    min_tokens: int = number(
        0,
        0,
        1 << 20,
        "Tokens before which an answer cannot end; a request may set its own (`mlx.min_tokens`).",
    )
    xtc_probability: float = number(
        0.0,
        0,
        1,
        "Chance per token that XTC sampling excludes all likely tokens but the last; a request may"
        " set its own (`mlx.xtc_probability`).",
    )
    xtc_threshold: float = number(
        0.1,
        0,
        1,
        "Probability from which XTC counts a token as likely; a request may set its own"
        " (`mlx.xtc_threshold`).",
    )
    grammar_type: str = text(
        "auto",
        "How a request's Grammar is read; auto reads a JSON object as a JSON schema, and other text"
        " as GBNF; a request may set its own (`mlx.grammar_type`).",
        ("auto", "gbnf", "json_schema", "lark", "regex"),
    )
    parallel_tool_calls: bool = flag(
        True,
        "Whether an answer that must call a tool may make several calls; a request may set its own"
        " (`mlx.parallel_tool_calls`).",
    )
    thinking_budget: int = number(
        -1,
        -1,
        100_000_000,
        "Most tokens of reasoning in an answer, after which its end is forced; -1 means no bound; a"
        " request may set its own (`mlx.thinking_budget`, or a reasoning effort).",
    )
    n_draft: int = number(
        8,
        1,
        64,
        "Most tokens guessed at a time where a model drafts; a request may set its own (`NDraft`).",
    )
    prompt_lookup: bool = flag(
        False,
        "Whether tokens are guessed from earlier text of the same request: faster where an answer"
        " quotes or repeats, with the same output.",
    )
    dtype: str = text(
        "auto",
        "Type of the weights in memory; auto casts to float32 on a CPU and keeps the checkpoint's"
        " own type on a GPU.",
        ("auto", "float32", "float16", "bfloat16"),
    )
    dequantize: bool | None = flag(
        None,
        "Whether quantised weights become dense ones at load where memory allows, which takes more"
        " of it; auto means on a CPU, where dense weights are faster.",
    )
    load_trial: bool = flag(
        True,
        "Whether a load ends with a few requests, alone and together, that are compared with the"
        " model's plain forward passes; a model that fails in a batch is then served one request at"
        " a time. It takes a quarter of the time of the load before it at most, or 3 seconds if"
        " that is more.",
    )
    trust_remote_code: bool = flag(
        False, "Whether Python files that come with the checkpoint may be run."
    )
    allow_media_paths: bool = flag(
        False,
        "Whether an item of a request's media may be an absolute path of a file here; only for"
        " hosts that stage files.",
    )
    max_image_pixels: int = number(
        33_554_432,
        1,
        89_478_485,
        "Most pixels of an image as it is decoded, of a frame of a video as it is stored, and of"
        " all frames taken from a video; all media of a request may have four times as many.",
    )
    video_frames: int = number(
        16,
        1,
        768,
        "Most frames that the model sees of a video, at even distances; all of them together are"
        " scaled down to max_image_pixels.",
    )
    max_video_seconds: int = number(3600, 1, 86_400, "Most seconds of one video.")
    max_audio_seconds: int = number(
        600, 1, 7200, "Most seconds of all sounds of a request together."
    )
    max_media_mib: int = number(64, 1, 1024, "Most MiB of one image, video or sound, as encoded.")
    vision_cache_mib: int = number(
        512,
        0,
        _MIB,
        "Memory in MiB for images, videos and sounds of earlier requests: half for the model's"
        " features, half for the processor's output; 0 turns it off.",
    )
    revision: str = text("", "Branch, tag or commit of a hub repository; empty means main.")
    type: str = text(
        "",
        "Kind of model, in place of what the checkpoint says; text serves only the text part of a"
        " vision-language model.",
        ("", "text", "vision", "embedding", "rerank", "token_classify"),
    )
    pooling: str = text(
        "",
        "How token vectors become the vector of Embedding: none returns each of them; empty means"
        " what the checkpoint says, and last for a model that generates.",
        ("", "mean", "last", "cls", "max", "none"),
    )
    normalize: bool | None = flag(
        None,
        "Whether vectors of Embedding are scaled to length 1; auto means what the checkpoint says,"
        " and true for a model that generates.",
    )
    tool_parser: str = text("", "Format of tool calls; empty means detected from the model.")
    reasoning_parser: str = text("", "Format of reasoning; empty means detected from the model.")
    eos_token: str = text("", "End-of-sequence token in place of the tokenizer's own.")
    bos_token: str = text("", "Beginning-of-sequence token in place of the tokenizer's own.")
    pad_token: str = text("", "Padding token in place of the tokenizer's own.")
    unk_token: str = text("", "Unknown-word token in place of the tokenizer's own.")
    sep_token: str = text("", "Separator token in place of the tokenizer's own.")
    cls_token: str = text("", "Classifier token in place of the tokenizer's own.")
    mask_token: str = text("", "Mask token in place of the tokenizer's own.")

    @classmethod
    def from_values(cls, values: Mapping[str, Any]) -> Settings:
        """Settings from typed values; the rest have their defaults. Raises InvalidRequest."""
        return cls(**{name: checked("setting", name, value) for name, value in values.items()})

    @property
    def extras(self) -> Extras:
        """The defaults of what requests have no field for."""
        return Extras(
            min_tokens=self.min_tokens,
            xtc_probability=self.xtc_probability,
            xtc_threshold=self.xtc_threshold,
            grammar_type=self.grammar_type,
            parallel_tool_calls=self.parallel_tool_calls,
            thinking_budget=self.thinking_budget,
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


def checked(source: str, name: str, value: Any) -> Any:
    """The value in the setting's own type. Raises InvalidRequest, which names source and name."""
    if name not in RULES:
        raise InvalidRequest(unknown_setting(source, name))
    try:
        return RULES[name].check(value)
    except ValueError as expected:
        words = f"{source} {name} must be {expected}, but it is {shown(value)}"
        raise InvalidRequest(words) from None


def unknown_setting(source: str, name: str) -> str:
    """What to say of a name that is none of ours; source: where it was given."""
    hint = did_you_mean(name, RULES)
    return f"unknown {source} {shown(name)}{hint or '; docs/options.md lists all settings'}"


def render_table() -> str:
    """The table of settings in Markdown, for docs/options.md."""
    rows = ["| option | value | default | meaning |", "|---|---|---|---|"]
    for name, rule in RULES.items():
        default = "auto" if rule.default is None else str(rule.default).lower()
        rows.append(f"| `{name}` | {rule.expects} | {default} | {rule.meaning} |")
    return "\n".join(rows) + "\n"


if __name__ == "__main__":
    print(render_table(), end="")
