"""A model's settings: one table, used to check values and to generate documentation.

Nothing here needs MLX, so the servicer can check settings before the engine imports MLX.
`python -m backend.engine.settings` prints the table of docs/options.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from backend.engine.errors import InvalidRequest
from backend.engine.request import Extras
from backend.engine.setting_rule import Rule, flag, number, text
from common.field_names import named
from common.wording import did_you_mean, shown

_MIB = 1 << 24  # 16 TiB in MiB: above any machine, below what overflows a byte count


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The settings of one loaded model. An empty string means: not set."""

    parallel: int = number(32, (1, 256), "Maximum number of requests decoded together.")
    max_queue: int = number(
        256, (0, 100_000), "Maximum number of requests that wait for a slot; others are refused."
    )
    prefill_chunk: int | None = number(
        None,
        (16, 8192),
        "Maximum number of prompt tokens in one prefill pass; auto is 512; on a GPU, and for models"
        " that attend to selected tokens only (DeepSeek-V3.2, GLM-5), 2048.",
    )
    stall_ms: int = number(
        250,
        (1, 60_000),
        "Longest pause, in ms, that a prefill pass should cause in running streams. A pass that"
        " completes prompts may take twice as long. A stream that has just begun may wait up to six"
        " times as long before a token, for prompts that arrived shortly after its own.",
    )
    stream_interval_ms: int = number(
        10,
        (0, 1000),
        "Time, in ms, for which a fast model's tokens are collected into one streamed Reply;"
        " while several answers stream, at least 6 ms for each of them, up to 100 ms in all. The"
        " first text of an answer and its end are never delayed. 0 sends each token separately.",
    )
    step_timeout: int | None = number(
        None,
        (0, 86_400),
        "Seconds after which an unfinished engine step counts as hung, and the process exits; 0"
        " means never, auto is 20 times what such a step should take, but at least 60.",
    )
    prompt_cache_mib: int | None = number(
        None,
        (0, _MIB),
        "Memory in MiB for the KV of earlier prompts; 0 turns the prompt cache off, auto is half"
        " of the memory that the weights leave.",
    )
    kv_bits: int = number(
        0,
        (0, 8),
        "Bits per value in the KV cache: 2, 3, 4, 5, 6 or 8; 0 keeps the model's own type.",
    )
    kv_group_size: int = number(
        0,
        (0, 128),
        "Values that share a scale in a quantised KV cache: 32, 64 or 128; 0 picks one for the"
        " model.",
    )
    max_cache_entries: int = number(
        0,
        (0, 1_000_000),
        "Maximum number of prompts in the prompt cache; 0 means only memory limits it.",
    )
    prompt_cache_dir: str = text(
        "",
        "Absolute path of a folder in which the KV of earlier prompts survives a restart; several"
        " models may share it. Empty turns the disk cache off.",
    )
    prompt_cache_disk_mib: int = number(
        4096,
        (1, _MIB),
        "Maximum size in MiB of prompt_cache_dir, and of a folder that a request names.",
    )
    memory_limit_mib: int | None = number(
        None,
        (0, _MIB),
        "Total memory in MiB that MLX may use; 0 or auto is what the device can spare.",
    )
    expert_cache_mib: int | None = number(
        None,
        (0, _MIB),
        "Memory in MiB for experts of a model whose experts stay in the checkpoint's files, from"
        " which a step reads those that are not in memory; 0 loads all experts into"
        " memory, auto does so if the model fits, and is otherwise three quarters of the memory"
        " that its other weights leave. Experts in files stay quantised, even with dequantize.",
    )
    repetition_guard: int = number(
        0,
        (0, 100_000),
        "End an answer after this many tokens that only repeat the text before them, with finish"
        " reason `stop` and the trailer `mlx-ended-by: repetition`; 0 turns the guard off.",
    )
    max_tokens: int = number(
        0,
        (0, 100_000_000),
        "Output limit in tokens for requests without one; 0 means up to the end of the context.",
    )
    min_tokens: int = number(
        0,
        (0, 1 << 20),
        "Minimum length of an answer in tokens, or its limit if that is smaller; a request may set"
        " its own (`mlx.min_tokens`).",
    )
    xtc_probability: float = number(
        0.0,
        (0, 1),
        "Probability per token that XTC sampling excludes all likely tokens except the least likely"
        " of them; a request may set its own (`mlx.xtc_probability`).",
    )
    xtc_threshold: float = number(
        0.1,
        (0, 1),
        "Probability above which XTC counts a token as likely; a request may set its own"
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
        "Whether an answer that must call a tool may contain several calls; a request may set its"
        " own (`mlx.parallel_tool_calls`).",
    )
    thinking_budget: int = number(
        -1,
        (-1, 100_000_000),
        "Maximum number of reasoning tokens in an answer, after which reasoning is closed; -1 means"
        " no limit; a request may set its own (`mlx.thinking_budget`, or a reasoning effort).",
    )
    n_draft: int = number(
        8,
        (1, 64),
        "Maximum number of tokens drafted at a time; a request may set its own (`NDraft`).",
    )
    prompt_lookup: bool = flag(
        False,
        "Whether tokens are drafted from earlier text of the same request, which speeds up answers"
        " that quote or repeat and does not change the output.",
    )
    mtp: bool | None = flag(
        None,
        "Whether tokens are drafted by the model's own head for multi-token prediction (MTP), which"
        " does not change the output; on and off mean true and false. auto uses a head in the"
        " checkpoint or in a folder beside it; if the head cannot be used, auto logs a warning and"
        " true refuses the load. Qwen3.5, Qwen3-Next, DeepSeek-V3, GLM-4.5 and later, Nemotron-H"
        " and MiMo as first published have such a head.",
    )
    dtype: str = text(
        "auto",
        "Type of the weights in memory; auto casts to float32 on a CPU and keeps the checkpoint's"
        " own type on a GPU.",
        ("auto", "float32", "float16", "bfloat16"),
    )
    dequantize: bool | None = flag(
        None,
        "Whether quantised weights are converted to dense ones at load if memory allows; auto means"
        " only on a CPU, where dense weights are faster.",
    )
    load_trial: bool | None = flag(
        None,
        "Whether a load ends with a few test requests, alone and batched, that are compared with"
        " reference forward passes of the model; a model that fails in a batch is then served one"
        " request at a time. auto means only the first load of a checkpoint, whose result is"
        " stored, and on a CPU no model of a tested family, unless it drafts or quantises its KV.",
    )
    parallelism: str = text(
        "auto",
        "How ranks divide a model: tensor, a part of every layer for each, or pipeline, some layers"
        " for each; auto means tensor over jaccl and nccl, and pipeline over others, if mlx-lm"
        " offers it for the model. Without ranks it has no effect.",
        ("auto", "tensor", "pipeline"),
    )
    hostfile: str = text(
        "",
        "Path of a JSON list with the address of every rank, for hosts that start only rank 0 and"
        " cannot change its command line; the first load that sets it makes the process rank 0 for"
        " the rest of its life, and later loads may not name other ranks. If it is empty,"
        " the command line decides.",
    )
    distributed_backend: str = text(
        "",
        "Transport of the ranks in hostfile; empty means `MLX_DISTRIBUTED_BACKEND`, or ring. It may"
        " not differ from the transport of ranks that are already connected. Without ranks it has"
        " no effect.",
        ("", "ring", "jaccl", "nccl", "mpi"),
    )
    rank_timeout: int = number(
        10,
        (2, 3600),
        "Seconds of silence after which a rank counts as lost. Without ranks it has no effect.",
    )
    trust_remote_code: bool = flag(False, "Whether Python files in the checkpoint may be run.")
    allow_media_paths: bool = flag(
        False,
        "Whether an item of a request's media may be the absolute path of a file on this machine;"
        " only for hosts that stage files.",
    )
    max_image_pixels: int = number(
        33_554_432,
        (1, 89_478_485),
        "Maximum number of pixels of a decoded image, of a video frame in its file, and of all used"
        " frames of a video together; all images and videos of a request together may have four"
        " times as many.",
    )
    video_frames: int = number(
        16,
        (1, 768),
        "Maximum number of frames of a video that the model reads, evenly spaced; together they are"
        " scaled down to max_image_pixels.",
    )
    max_video_seconds: int = number(3600, (1, 86_400), "Maximum length in seconds of a video.")
    max_audio_seconds: int = number(
        600, (1, 7200), "Maximum length in seconds of all audio in a request together."
    )
    max_media_mib: int = number(
        64, (1, 1024), "Maximum file size in MiB of one image, video or audio file."
    )
    vision_cache_mib: int = number(
        512,
        (0, _MIB),
        "Memory in MiB for images, videos and audio of earlier requests: half for the model's"
        " features, half for the processor's output; 0 turns this cache off.",
    )
    revision: str = text("", "Branch, tag or commit of a hub repository; empty means main.")
    context: str = text(
        "",
        "`max` replaces context_size by 0, as many tokens as fit, because LocalAI sends 4096 for a"
        " model file without context_size. max_model_len still limits the context.",
        ("", "max"),
    )
    type: str = text(
        "",
        "Kind of model; empty means detected from the checkpoint, text serves only the text part of"
        " a vision-language model.",
        ("", "text", "vision", "embedding", "rerank", "token_classify", "transcribe"),
    )
    pooling: str = text(
        "",
        "How token vectors are combined for Embedding; none returns all of them; empty means the"
        " checkpoint's own way, or last for a generative model.",
        ("", "mean", "last", "cls", "max", "none"),
    )
    normalize: bool | None = flag(
        None,
        "Whether Embedding vectors are normalised to length 1; auto means as the checkpoint says,"
        " or true for a generative model.",
    )
    prompt_name: str = text(
        "",
        "Name of the prompt in config_sentence_transformers.json that precedes texts and queries if"
        " their request names no prompt; empty means the file's `default_prompt_name`.",
    )
    truncate: bool = flag(
        True,
        "Whether an input of Embedding or Rerank that is too long for the model loses its end; if"
        " not, the request is refused. A request may choose otherwise.",
    )
    task: str = text(
        "",
        "Task whose adapter an embedding model applies, such as `retrieval.passage` of Jina"
        " embeddings v3; empty applies none, which Jina embeddings v4 does not allow.",
    )
    adapters: str = text(
        "",
        "LoRA adapters of which each request may choose one, by Metadata `mlx.adapter`: names and"
        " references such as `sql=/models/sql, fr=org/french`.",
    )
    tool_parser: str = text("", "Tool call format; empty means detected from the model.")
    reasoning_parser: str = text("", "Reasoning format; empty means detected from the model.")
    eos_token: str = text("", "End-of-sequence token that replaces the tokenizer's own.")
    bos_token: str = text("", "Beginning-of-sequence token that replaces the tokenizer's own.")
    pad_token: str = text("", "Padding token that replaces the tokenizer's own.")
    unk_token: str = text("", "Unknown-word token that replaces the tokenizer's own.")
    sep_token: str = text("", "Separator token that replaces the tokenizer's own.")
    cls_token: str = text("", "Classifier token that replaces the tokenizer's own.")
    mask_token: str = text("", "Mask token that replaces the tokenizer's own.")

    @classmethod
    def from_values(cls, values: Mapping[str, Any]) -> Settings:
        """Return settings with these values, and defaults for the others. Raises InvalidRequest."""
        return cls(**{name: checked("setting", name, value) for name, value in values.items()})

    @property
    def extras(self) -> Extras:
        """Defaults for settings that requests have no field for."""
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
        """The special tokens that are set, by the tokenizer's names for them."""
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
    """Return the requested dtype: the setting, else the field DType of the load request, or `auto`.

    Hosts send DType to several engines, so the names that these have for types are accepted too.
    """
    if settings.dtype != "auto":
        return settings.dtype
    aliases = {"": "auto", "half": "float16", "float": "float32", "fp16": "float16"}
    aliases |= {"bf16": "bfloat16", "fp32": "float32", "f16": "float16", "f32": "float32"}
    name = field_value.strip().lower()
    name = aliases.get(name, name)
    if name not in RULES["dtype"].choices:
        raise InvalidRequest(
            f"{named('DType')} must be {RULES['dtype'].expects}, but it is {shown(field_value)}"
        )
    return name


def checked(source: str, name: str, value: Any) -> Any:
    """Return the value in the setting's type. Raises InvalidRequest with the setting's name.

    source: the word before the name in the error message.
    """
    if name not in RULES:
        raise InvalidRequest(unknown_setting(source, name))
    try:
        return RULES[name].check(value)
    except ValueError as expected:
        words = f"{source} {name} must be {expected}, but it is {shown(value)}"
        raise InvalidRequest(words) from None


def unknown_setting(source: str, name: str) -> str:
    """Return the error message for an unknown name, after the word `source`."""
    hint = did_you_mean(name, RULES)
    return f"unknown {source} {shown(name)}{hint or '; docs/options.md lists all settings'}"


def render_table() -> str:
    """Return the table of settings in Markdown, for docs/options.md."""
    rows = ["| option | value | default | meaning |", "|---|---|---|---|"]
    for name, rule in RULES.items():
        default = "auto" if rule.default is None else str(rule.default).lower()
        rows.append(f"| `{name}` | {rule.expects} | {default} | {rule.meaning} |")
    return "\n".join(rows) + "\n"


if __name__ == "__main__":
    print(render_table(), end="")
