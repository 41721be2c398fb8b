"""What becomes of every field of PredictOptions and ModelOptions: honoured, refused, or unused.

A host fills each message from its configuration (contract 2.2, 2.7), so most fields arrive with
values that mean "off"; those pass. A field whose loss would change what the user gets is refused
by value instead of being dropped. `python -m backend.rpc.fields` prints the tables of
docs/fields.md; tests walk the descriptors and the code that reads them, so a new field needs a row.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from backend.engine.errors import InvalidRequest
from backend.rpc.request_metadata import KEYS, PREFIX
from wire import backend_pb2 as pb


@dataclass(frozen=True, slots=True)
class Neutral:
    """The values of a field that ask for nothing. `words` names them for a reader."""

    holds: Callable[[Any], bool]
    words: str


@dataclass(frozen=True, slots=True)
class Refused:
    """The values that pass, why others are not honoured, and what to send instead."""

    neutral: Neutral
    why: str
    instead: str


@dataclass(frozen=True, slots=True)
class Fields:
    """The fields of one message, each in one of three tables.

    honoured: what the field does. refused: when it is as good as absent. unused: why it means
    nothing here.
    """

    message: type[Any]
    honoured: Mapping[str, str]
    refused: Mapping[str, Refused]
    unused: Mapping[str, str]

    def require_neutral(self, message: Any) -> None:
        """Raise InvalidRequest for the first refused field that asks for something."""
        for name, row in self.refused.items():
            value = getattr(message, name)
            if not row.neutral.holds(value):
                given = f"is {value:g}" if isinstance(value, (int, float)) and value else "is set"
                raise InvalidRequest(f"{name} {given}, but {row.why}: {row.instead}", name)

    def rows(self) -> Iterator[tuple[str, str]]:
        """Each field, in the order of the message, and what becomes of it in Markdown."""
        for field in self.message.DESCRIPTOR.fields:
            name = field.name
            if name in self.honoured:
                yield name, f"**honoured**: {self.honoured[name]}"
            elif name in self.refused:
                row = self.refused[name]
                passes = f"**refused** unless it is {row.neutral.words}"
                yield name, f"{passes}: {row.why}; {row.instead}"
            else:
                yield name, f"no meaning: {self.unused[name]}"


def _one_of(*values: object) -> Neutral:
    return Neutral(lambda value: value in values, " or ".join(map(str, values)))


def _word_of(*words: str) -> Neutral:
    """One of the words, in any case, or nothing."""
    return Neutral(
        lambda value: value.strip().lower() in ("", *words),
        " or ".join(("empty", *(f"`{word}`" for word in words))),
    )


_EMPTY = Neutral(lambda value: not value, "empty")
# A probability mass that keeps every token: 0 is unset, 1 and more is everything.
_OFF_SHARE = Neutral(lambda value: value == 0 or 1 <= value < math.inf, "0, or 1 and more")

_LATER = "this version does not apply it"
_DEVICE = "MLX places memory and work itself"
_AT_LOAD = "fixed when the model is loaded"
_MIROSTAT = "belongs to Mirostat, which is refused"
_CHECKPOINT = "the checkpoint's config.json says it"
_IMAGES = "for models that make images"
_ROPE = "positions are as the checkpoint's config.json says"
_LOG = "MLX_BACKEND_LOG sets the log level"

PREDICT_OPTIONS = Fields(
    pb.PredictOptions,
    honoured={
        "Prompt": "goes to the model as it is, unless Messages are rendered; a BOS token is added"
        " only where the text has none",
        "Messages": "rendered by the model's chat template when UseTokenizerTemplate is set; the"
        " line `x-anthropic-billing-header: …` of a system message, which clients change with every"
        " request, is left out",
        "UseTokenizerTemplate": "renders Messages, if there are any, whatever Prompt holds",
        "Metadata": "`enable_thinking`, `reasoning_effort` and `chat_template_kwargs` reach the"
        " chat template; keys that begin with `mlx.` are the settings below; other keys are labels"
        " of clients and mean nothing",
        "Images": "shown to a model that takes images, before the text of the last user's message"
        " or where `mlx.image_messages` says (docs/vision.md); refused for other models",
        "Videos": "the same for videos and `mlx.video_messages`; frames of them, where the model"
        " takes no videos",
        "Audios": "the same for sounds and `mlx.audio_messages`",
        "Tools": "shown by the chat template in the order of their names, or described in text"
        " where it shows none (docs/formats.md); answers that call one become tool-call deltas;"
        " with a tool that is `strict`, a grammar holds calls to the schemas",
        "ToolChoice": "`none` hides the tools; a grammar enforces `required` and a named function,"
        " in the model's own call format",
        "Tokens": "most tokens to generate; 0, -1 and -2 mean up to the end of the context",
        "StopPrompts": "the first to appear ends the text before it; empty ones are skipped",
        "IgnoreEOS": "the end-of-sequence tokens cannot be chosen; a grammar still ends the answer",
        "Temperature": "from 0 to 100; 0 takes the best token",
        "TopP": "share of probability to keep; 0 or 1 and more is off",
        "TopK": "tokens to keep; 0 or -1 is off",
        "MinP": "share of the best token's probability, from 0 to 1; 0 is off",
        "TypicalP": "locally typical sampling; 0 or 1 and more is off",
        "Seed": "the same seed and request give the same tokens, alone or in a batch; -1 draws one",
        "Penalty": "llama.cpp's repetition penalty over prompt and output; 0 or 1 is off",
        "Repeat": "tokens that Penalty looks back; 0 means 64, -1 means all",
        "FrequencyPenalty": "OpenAI's, per earlier occurrence in the output; 0 is off",
        "PresencePenalty": "OpenAI's, once per token seen in the output; 0 is off",
        "LogitBias": "JSON object, token id → what is added to its logit; an id that the model"
        " does not have is an error",
        "Grammar": "GBNF, or a JSON schema as a JSON object, that the answer must match; reasoning"
        " may come before it where the model thinks. GBNF beside Tools with one that is `strict` is"
        " the host's form of calls, and left out: calls are enforced in the model's own",
        "PromptCachePath": "an absolute path: the file that keeps a conversation's KV over a"
        " restart; empty leaves it to the folder of `prompt_cache_dir`, if there is one",
        "PromptCacheAll": "keeps the answer's KV on disk as well, not the prompt's alone",
        "PromptCacheRO": "reads from disk, and writes nothing",
        "NDraft": "most tokens guessed at a time, where the model was loaded with DraftModel or"
        " `prompt_lookup`; the output does not depend on it; 0 leaves it to `n_draft`",
        "Logprobs": "above 0: a log-probability per generated token, of the model's distribution"
        " before bias, penalties, grammar and temperature",
        "TopLogprobs": "alternatives per token, up to 20; above 0 it asks for Logprobs as well",
        "CorrelationId": "leads the request's name in the log, if it is only a label",
        "ModelIdentity": "compared with the loaded model's before anything else",
        "Embeddings": "the text that the Embedding RPC turns into a vector; no generation reads it",
        "EmbeddingTokens": "the same in token ids, taken as they are; send one of the two",
    },
    refused={
        "TailFreeSamplingZ": Refused(_OFF_SHARE, _LATER, "send 1 and use TopP or MinP"),
        "Mirostat": Refused(_one_of(0), _LATER, "send 0 and use TopP or MinP"),
        "NegativePrompt": Refused(_EMPTY, _LATER, "leave it empty"),
    },
    unused={
        "Threads": _DEVICE,
        "Batch": "prefill is cut by the prefill_chunk setting; the result does not depend on it",
        "NKeep": "says what to keep when a context is shifted, and contexts are never shifted here",
        "F16KV": _AT_LOAD,
        "MLock": _DEVICE,
        "MMap": _DEVICE,
        "MainGPU": _DEVICE,
        "TensorSplit": _DEVICE,
        "DebugMode": _LOG,
        "Debug": _LOG,
        "RopeFreqBase": _AT_LOAD,
        "RopeFreqScale": _AT_LOAD,
        "PenalizeNL": "Penalty counts newlines like any token, as llama.cpp does today",
        "MirostatETA": _MIROSTAT,
        "MirostatTAU": _MIROSTAT,
        "NegativePromptScale": "belongs to NegativePrompt, which is refused",
    },
)

MODEL_OPTIONS = Fields(
    pb.ModelOptions,
    honoured={
        "Model": "what to load: hub id, hub URL, or path",
        "ModelFile": "served if it exists",
        "ModelPath": "folder in which Model is looked up",
        "ContextSize": "tokens of prompt plus output; 0 means the model's own maximum",
        "MaxModelLen": "the same bound; the smaller one counts",
        "DType": "type of the weights: float32, float16, bfloat16 or auto",
        "TrustRemoteCode": "allows Python code that comes with the checkpoint",
        "Embeddings": "the model must answer Embedding: one that cannot is refused",
        "Reranking": "the model must answer Rerank: a Qwen3 model is loaded as a reranker, and a"
        " model that cannot rerank is refused",
        "Options": "settings of docs/options.md, as `key:value`",
        "CacheTypeKey": "form of the KV cache: empty, `f16` (as the model computes), `q8_0`,"
        " `q5_0`, `q4_0` …; refused where the name is unknown or the model does not allow it",
        "CacheTypeValue": "the same as CacheTypeKey: MLX has one form for both",
        "LoraAdapter": "an mlx-lm adapter: absolute path, path under ModelPath, or hub id",
        "LoraAdapters": "further ones; several add up",
        "LoraScale": "multiplies the adapter's own scale; 0 means 1",
        "LoraScales": "the same, in the order of LoraAdapters",
        "DraftModel": "a smaller model of the same tokenizer that guesses ahead while one request"
        " runs",
        "LimitImagePerPrompt": "most Images of a request; 0 means 16",
        "LimitVideoPerPrompt": "most Videos of a request; 0 means 16",
        "LimitAudioPerPrompt": "most Audios of a request; 0 means 16",
        "EngineArgs": "the same settings as a JSON object; an unknown key fails",
    },
    refused={
        "LoraBase": Refused(
            _EMPTY, "adapters are applied to the weights of the model itself", "leave it empty"
        ),
        "MMProj": Refused(
            _EMPTY, "a vision model for MLX has its vision tower among its weights", "remove mmproj"
        ),
        "Quantization": Refused(
            _EMPTY,
            "an MLX checkpoint carries its own quantisation",
            "choose a quantised checkpoint",
        ),
        "LoadFormat": Refused(
            _word_of("auto", "safetensors"), "only safetensors are read", "leave it empty"
        ),
        "Tokenizer": Refused(_EMPTY, "the checkpoint's own tokenizer is used", "leave it empty"),
        "Overrides": Refused(_EMPTY, _LATER, "edit the checkpoint's config.json"),
        "RopeScaling": Refused(_word_of("none"), _ROPE, "leave it empty"),
        "RopeFreqBase": Refused(_one_of(0), _ROPE, "send 0"),
        "RopeFreqScale": Refused(_one_of(0, 1), _ROPE, "send 0"),
        "YarnExtFactor": Refused(_one_of(0, -1), _ROPE, "send 0"),
        "YarnAttnFactor": Refused(_one_of(0, 1), _ROPE, "send 0"),
        "YarnBetaFast": Refused(_one_of(0, 32), _ROPE, "send 0"),
        "YarnBetaSlow": Refused(_one_of(0, 1), _ROPE, "send 0"),
        "TensorParallelSize": Refused(_one_of(0, 1), "one process serves the model", "send 0 or 1"),
    },
    unused={
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
        "GrammarTriggers": "for lazy grammars; here Grammar holds from the start of the answer",
        "DisableLogStatus": _LOG,
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
    },
)


def render() -> str:
    """The tables of docs/fields.md."""
    keys = {f"{PREFIX}{name}": key.meaning for name, key in KEYS.items()}.items()
    return "\n".join(
        (
            _table("PredictOptions", "field | what becomes of it", PREDICT_OPTIONS.rows()),
            _table("Metadata of a request", "key | meaning", keys),
            _table("ModelOptions", "field | what becomes of it", MODEL_OPTIONS.rows()),
        )
    )


def _table(title: str, columns: str, rows: Iterable[tuple[str, str]]) -> str:
    lines = (f"| `{name}` | {words} |\n" for name, words in rows)
    return f"## {title}\n\n| {columns} |\n|---|---|\n{''.join(lines)}"


if __name__ == "__main__":
    print(render(), end="")
