"""One model as its YAML file describes it, with LocalAI's keys, and its defaults for requests.

Files written for LocalAI work unchanged. A key without meaning for a language model on MLX is
ignored; a key whose effect would be missed is refused, with advice on what to do instead. Both
tables are part of docs/models.md.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from common.field_table import FieldTable, Refused, each
from gateway.described import about

_NEUTRAL = each(
    {
        "a text for the model gallery": "usage",
        "the backend reports what the model can do": "known_usecases known_input_modalities"
        " known_output_modalities",
        "the backend downloads models from the hub": "download_files artifacts",
        "`dtype`, or else the platform, sets the type of the weights": "f16",
        "MLX manages memory and threads itself": "threads mmap mmlock low_vram gpu_layers numa"
        " no_mulmatq main_gpu tensor_split no_kv_offloading enforce_eager swap_space",
        "the option memory_limit_mib limits memory": "gpu_memory_utilization",
        "MLX chooses its attention kernels itself": "flash_attention",
        "the option prefill_chunk sets the size of prefill passes": "batch parameters.batch",
        "the value comes from the checkpoint's config.json": "rms_norm_eps ngqa",
        "MLX_BACKEND_LOG sets the log level": "debug disable_log_stats",
        "tool calls are read in the model's own format, which the backend detects": "function",
        "prompts are always cached; see the option prompt_cache_mib": "prompt_cache_all"
        " prompt_cache_ro",
        "belongs to mirostat, which is refused": "mirostat_eta mirostat_tau",
        "the gateway notices the end of a backend, and gives it a minute to start": "grpc",
        "belongs to another part of LocalAI": "feature_flags pipeline mcp agent pii_detection",
        "for models that generate images, audio or video": "cuda diffusers step tts cfg_scale"
        " parameters.language parameters.translate parameters.clip_skip",
        "contexts are never shifted": "parameters.n_keep",
        "belongs to negative_prompt, which is refused": "parameters.negative_prompt_scale",
        "set by each request": "parameters.encoding_format",
    }
)
_REFUSED = each(
    {
        "write this name into the list `aliases` of the model itself": "alias",
        "a request is served by one model; leave it out": "failover router",
        "only backends that speak backend.proto are served": "proxy",
        "send role_mapping with the request": "roles",
        "send it as the first of the request's messages": "system_prompt",
        "send a grammar or a response_format with the request": "grammar",
        "answers are not edited; use stopwords": "cutstrings extract_regex trimspace trimsuffix",
        "use top_p or min_p": "mirostat parameters.tfz",
        "use the option prompt_cache_dir": "prompt_cache_path",
        "use the gateway's limits on loaded models and memory": "concurrency_groups",
        "use the option max_queue": "limits",
        "requests are not edited; leave it out": "compression pii",
        "set by each request": "parameters.n parameters.echo parameters.logprobs"
        " parameters.top_logprobs",
        "the backend does not support it; leave it out": "parameters.negative_prompt",
        "the checkpoint's own template is used; leave it out": "template.chat"
        " template.chat_message template.function template.multimodal template.reply_prefix"
        " template.join_chat_messages_by_character",
        "completion prompts are sent unchanged; leave it out": "template.completion",
        "there is no edits endpoint; leave it out": "template.edit",
    }
)


KEYS = FieldTable({key: Refused(advice) for key, advice in _REFUSED.items()}, _NEUTRAL)
Share = Annotated[float, Field(ge=0, le=1)]
DEFAULTS = {
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "typical_p": 1.0,
    "repeat_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
}
"""Defaults when neither the request nor the model sets a value: OpenAI's, or off."""
OWN_BACKENDS = ("", "mlx", "mlx-backend", "mlx-vlm")  # names for the run.sh of this checkout
_ADAPTER = re.compile(r"[A-Za-z0-9._/-]{1,100}")
_ADDRESS = re.compile(r"(?:\S+|\[[0-9a-fA-F:]+\]):[0-9]{1,5}")
Name = Annotated[str, Field(min_length=1, max_length=200, pattern=r"^[^\x00-\x1f\x7f]+$")]


def foreign(section: str = "") -> Any:
    """Return a validator that removes ignored keys from a section of a model file.

    It raises ValueError for a key that is refused, unless the value is empty, zero or false.

    section: the name of the section and a dot; "" for the keys outside.
    """

    def without(given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        keys = {f"{section}{key}": value for key, value in given.items()}
        if name := KEYS.first_refused(keys):
            raise ValueError(f"{name} is not applied by this gateway: {KEYS.refused[name].instead}")
        return {key.removeprefix(section): value for key, value in KEYS.without(keys).items()}

    return model_validator(mode="before")(without)


class Strict(BaseModel):
    """A section of a model file: unknown keys and values of other types are refused."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        strict=True,
        allow_inf_nan=False,
        protected_namespaces=(),
        defer_build=True,
    )


class Parameters(Strict):
    """The section `parameters`: the checkpoint, and sampling defaults.

    None means not set in the file; then the checkpoint's value applies, else DEFAULTS.
    """

    model: str = Field(
        min_length=1,
        description="Hub id (`owner/name`), folder under the models folder, or absolute path.",
    )
    temperature: float | None = about("0 always picks the most likely token.", ge=0, le=100)
    top_p: Share | None = about("Probability mass to keep.")
    top_k: int | None = about("Number of tokens to keep; 0 or -1 is off.", ge=-1)
    min_p: Share | None = about("Minimum probability, as a share of the most likely token's.")
    typical_p: Share | None = about("Locally typical sampling; 1 is off.")
    max_tokens: int | None = about("Maximum number of tokens in an answer.", ge=1)
    seed: int | None = about("-1 draws a new one for each request.", ge=-1, lt=1 << 31)
    repeat_penalty: float | None = about(
        "llama.cpp's repetition penalty over prompt and answer; 1 is off.", ge=0
    )
    repeat_last_n: int | None = about(
        "Number of recent tokens that repeat_penalty covers; -1 means all.", ge=-1
    )
    frequency_penalty: float | None = about("OpenAI's; 0 is off.", ge=-2, le=2)
    presence_penalty: float | None = about("OpenAI's; 0 is off.", ge=-2, le=2)
    logit_bias: dict[str, float] | None = about("Token id → value added to its logit.")
    ignore_eos: bool | None = about("Continue after the end-of-sequence token, up to max_tokens.")
    tokenizer: str = about("Passed to LoadModel; refused by this backend.", "")
    rope_freq_base: float = about("Passed to LoadModel.", 0)
    rope_freq_scale: float = about("Passed to LoadModel.", 0)

    def chosen(self, name: str, given: float | None = None) -> float:
        """Return the request's value, else the model's, else the default."""
        value: float | None = getattr(self, name) if given is None else given
        return DEFAULTS[name] if value is None else value

    @field_validator("logit_bias", mode="before")
    @classmethod
    def _token_ids(cls, given: Any) -> Any:
        """Turn ids into strings: YAML reads them as numbers, but JSON keys are strings."""
        if not isinstance(given, dict):
            return given
        return {str(key) if type(key) is int else key: value for key, value in given.items()}

    _foreign = foreign("parameters.")


class Template(Strict):
    """The section `template`. The checkpoint has its own chat template, so only one key remains."""

    use_tokenizer_template: Literal[True] = about(
        "Must be true: only the checkpoint's template is supported.", True
    )

    _foreign = foreign("template.")


class Reasoning(Strict):
    """The section `reasoning`: whether a model thinks if a request does not set that."""

    disable: bool | None = about("`true`: no thinking (enable_thinking false); `false`: thinking.")


class WarmPrompt(Strict):
    """The beginning of a prompt, which is read ahead."""

    system: str = ""
    tools: list[dict[str, Any]] = []


class ModelConfig(Strict):
    """A model of the models folder. What is passed to LoadModel is checked by the backend."""

    name: Name = Field(description="The name that requests use; if missing, the file's name.")
    aliases: list[Name] = about("Other names of the model.", [])
    description: str = about("A description for people.", "")
    disabled: bool = about("Ignore this file.", False)
    backend: str = about(
        "Absolute path of a `run.sh` to start; empty, `mlx`, `mlx-vlm` or"
        " `mlx-backend`: the one that comes with the gateway.",
        "",
    )
    address: str = about(
        "`host:port` of a backend that is already running; the gateway never stops it.", ""
    )
    env: dict[str, str] = about("Environment variables for the backend's process.", {})
    parameters: Parameters
    stopwords: list[str] = about("Stop strings, in addition to those of a request.", [])
    template: Template = Template()
    chat_template_kwargs: dict[str, Any] = about(
        "Variables for the chat template; a request's own take precedence.", {}
    )
    reasoning: Reasoning = Reasoning()
    reasoning_effort: str = about(
        "`none`, `minimal`, `low`, `medium` or `high`, for requests without one.", ""
    )

    context_size: int = about(
        "Maximum tokens of prompt and answer together; 0: as many as memory holds for one request,"
        " at most the model's maximum.",
        0,
        ge=0,
        lt=1 << 31,
    )
    max_model_len: int = about("As context_size; the smaller applies.", 0, ge=0, lt=1 << 31)
    options: list[str] = about("`key:value`, see [options.md](options.md).", [])
    engine_args: dict[str, Any] = about(
        "Options as a map, which takes precedence; an unknown key fails the load.", {}
    )
    overrides: list[str] = about("Passed to LoadModel.", [])
    type: str = about("Passed to LoadModel.", "")
    dtype: str = about("Type of the weights: float32, float16, bfloat16, auto.", "")
    quantization: str = about("Passed to LoadModel.", "")
    load_format: str = about("Passed to LoadModel.", "")
    trust_remote_code: bool = about("Whether Python files in the checkpoint may be run.", False)
    embeddings: bool = about("Require a model that can serve /embeddings.", False)
    reranking: bool = about("Require a model that can serve /rerank.", False)
    mmproj: str = about("Passed to LoadModel.", "")
    cache_type_k: str = about("Type of the KV cache: `f16`, `q8_0`, `q4_0` …", "")
    cache_type_v: str = about("The same for the values; may differ, such as `q8_0` and `q4_0`.", "")
    rope_scaling: str = about("Passed to LoadModel.", "")
    yarn_ext_factor: float = about("Passed to LoadModel.", 0)
    yarn_attn_factor: float = about("Passed to LoadModel.", 0)
    yarn_beta_fast: float = about("Passed to LoadModel.", 0)
    yarn_beta_slow: float = about("Passed to LoadModel.", 0)
    tensor_parallel_size: int = about("Passed to LoadModel.", 0, ge=0)
    lora_adapter: str = about("An adapter of mlx-lm or PEFT: folder, path or hub id.", "")
    lora_base: str = about("Passed to LoadModel.", "")
    lora_scale: float = about("Multiplies the adapter's own scale; 0 means 1.", 0)
    lora_adapters: list[str] = about("Several adapters, which are added up.", [])
    lora_scales: list[float] = about("Scales of lora_adapters, in the same order.", [])
    adapters: dict[str, str] = about(
        "Name → LoRA adapter: a request may choose one with `adapters`, or by its name as `model`.",
        {},
    )
    draft_model: str = about(
        "The drafter: a small model, a prediction head (MTP), EAGLE-3 or DFlash.", ""
    )
    draft_models: list[str] = about(
        "Draft models that a request may choose with `draft_model`.", []
    )
    n_draft: int = about("Maximum number of tokens drafted at a time.", 0, ge=0, le=64)

    preload: bool = about("Load the model when the gateway starts.", False)
    warm_prompts: list[WarmPrompt] = about(
        "Prompts that are read after a load while no request runs: each has `system`, a text, and"
        " `tools`, a list in OpenAI's form. See [gateway.md](gateway.md#warm-prompts).",
        [],
    )
    pinned: bool = about("Never unload the model, neither to free memory nor when idle.", False)
    idle_unload: float | None = about(
        "Unload after this many seconds without a request; 0: never; if missing, the"
        " gateway's `--idle-unload`.",
        ge=0,
    )
    memory_mib: int = about(
        "Memory that the model needs, in MiB; 0: the size of its weights, if they are local.",
        0,
        ge=0,
    )

    def option(self, key: str) -> str:
        """Return an option for the backend; '' if the file does not set it."""
        options = dict(option.partition(":")[::2] for option in self.options)
        return str(self.engine_args.get(key) or options.get(key) or "").strip()

    _foreign = foreign()

    @model_validator(mode="after")
    def _reachable(self) -> Self:
        if self.address and self.backend not in OWN_BACKENDS:
            raise ValueError("backend and address are both given: keep one of them")
        if self.address and not _ADDRESS.fullmatch(self.address):
            raise ValueError(f"address is {self.address!r}: write it as host:port")
        if self.backend not in OWN_BACKENDS and not self.backend.startswith("/"):
            raise ValueError(
                f"backend is {self.backend!r}: leave it out for MLX, or give the absolute path of"
                " a run.sh"
            )
        return self

    @model_validator(mode="after")
    def _choosable(self) -> Self:
        names = {name.casefold() for name in (self.name, *self.aliases)}
        if self.adapters and self.backend not in OWN_BACKENDS:
            raise ValueError("adapters is set, but another backend does not apply them: remove it")
        for name, reference in self.adapters.items():
            if name.casefold() in names:
                raise ValueError(f"adapters has the name {name!r}, the model's own: use another")
            if not _ADAPTER.fullmatch(name) or "," in reference:
                raise ValueError(
                    f"adapters has the entry {name!r}: write its name in letters, digits and"
                    " . _ - /, and a path or hub id without commas"
                )
        return self
