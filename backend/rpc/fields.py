"""States how each field of a request is treated: used, refused, or without effect (neutral).

These are the requests to generate, load and transcribe. Hosts fill most fields from their
configuration, so most fields arrive with values that mean "off"; those are accepted. If ignoring a
field would change what the user gets, any other value of the field is refused.
`python -m backend.rpc.fields` prints the tables of docs/fields.md; tests compare them with the
protobuf descriptors and the code that reads the fields, so a new field needs a row.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from backend.engine.errors import InvalidRequest
from backend.rpc.request_metadata import KEYS, PREFIX
from common.field_names import MODEL_KEYS, in_snake_case, named, written
from common.field_table import EMPTY, FieldTable, Off, Refused, each, one_of
from wire import backend_pb2 as pb


def require_neutral(table: FieldTable, message: Any) -> None:
    """Raise InvalidRequest for a refused field that is set."""
    if name := table.first_refused({name: getattr(message, name) for name in table.refused}):
        row, value = table.refused[name], getattr(message, name)
        # `%g` rounds a large integer. A text may be a user's, and messages are logged.
        written = f"{value:g}" if isinstance(value, float) else str(value)
        given = f"is {written}" if isinstance(value, (int, float)) and value else "is set"
        raise InvalidRequest(f"{named(name)} {given}, but {row.why}: {row.instead}")


def _empty_or_word(*words: str) -> Off:
    return Off(
        lambda value: value.strip().lower() in ("", *words),
        " or ".join(("empty", *(f"`{word}`" for word in words))),
    )


# A probability mass that keeps every token: 0 means unset, 1 and above means all.
_OFF_SHARE = Off(lambda value: value == 0 or 1 <= value < math.inf, "0, or 1 or more")

_LATER = "this version does not support it"
_DEVICE = "MLX manages memory and threads itself"
_ROPE = "position encoding is set by the checkpoint's config.json"
_LOG = "MLX_BACKEND_LOG sets the log level"
_CHUNK = "the option prefill_chunk sets the size of prefill passes"
_WHOLE = "for lazy grammars; here Grammar applies from the start of the answer"

PREDICT_OPTIONS = FieldTable(
    used={
        "Prompt": "goes to the model unchanged, unless Messages are rendered; a BOS token is added"
        " only if the text has none",
        "Messages": "rendered by the model's chat template when UseTokenizerTemplate is set; the"
        " line `x-anthropic-billing-header: …` of a system message, which clients change with every"
        " request, is removed",
        "UseTokenizerTemplate": "renders Messages, if there are any, whatever Prompt contains",
        "Metadata": "`enable_thinking`, `reasoning_effort` and `chat_template_kwargs` reach the"
        " chat template; keys that begin with `mlx.` are listed below; other keys are client"
        " labels and have no effect",
        "Images": "shown to a model that accepts images, before the text of the last user message"
        " or at the positions that `mlx.image_messages`, or `<__media__>` in Messages, gives"
        " (docs/vision.md); refused for other models",
        "Videos": "the same for videos and `mlx.video_messages`; shown as a sequence of images if"
        " the model accepts only images",
        "Audios": "the same for audio and `mlx.audio_messages`",
        "Tools": "rendered by the chat template, sorted by name, or described in text if the"
        " template renders no tools (docs/formats.md); calls in the answer become tool-call deltas;"
        " for a `strict` tool, a grammar enforces the schema. Without Messages, Tools and"
        " ToolChoice have no effect: the host has written the tools into Prompt",
        "ToolChoice": "`none` hides the tools; a grammar enforces `required` and a named function,"
        " in the model's own call format",
        "Tokens": "maximum number of tokens to generate; 0, -1 and -2 mean up to the end of the"
        " context",
        "StopPrompts": "the answer ends before the first one that appears; empty strings are"
        " skipped",
        "IgnoreEOS": "end-of-sequence tokens are never sampled; a grammar still ends the answer",
        "Temperature": "from 0 to 100; 0 always picks the most likely token",
        "TopP": "probability mass to keep; 0, or 1 or more, is off",
        "TopK": "number of tokens to keep; 0 or -1 is off",
        "MinP": "minimum probability, as a share of the most likely token's, from 0 to 1; 0 is off",
        "TypicalP": "locally typical sampling; 0, or 1 or more, is off",
        "Seed": "the same seed and request give the same tokens, alone or in a batch; -1 draws a"
        " new seed",
        "Penalty": "llama.cpp's repetition penalty over prompt and output; 0 or 1 is off",
        "Repeat": "number of recent tokens that Penalty covers; 0 means 64, -1 means all",
        "FrequencyPenalty": "OpenAI's, per earlier occurrence in the output; 0 is off",
        "PresencePenalty": "OpenAI's, once per token seen in the output; 0 is off",
        "LogitBias": "JSON object, token id → value added to its logit; an id that the model does"
        " not have is an error",
        "Grammar": "GBNF, or a JSON schema as a JSON object, that the answer must match; objects"
        " whose `properties` are listed have no others unless the schema sets"
        " `additionalProperties` or combines schemas, and integers have at most 18 digits; a"
        " reasoning model may think before it. If Tools has a `strict` tool, a GBNF grammar is"
        " ignored: it is the host's own call format, and calls are enforced in the model's format"
        " instead",
        "PromptCachePath": "absolute path of a folder that stores the KV of a conversation;"
        " if empty, the folder `prompt_cache_dir` is used, if set. No files are used for prompts"
        " with media, for models whose KV cannot be stored (the log of the load says so) and for"
        " models that are divided among ranks",
        "PromptCacheAll": "saves the answer's KV on disk as well, not only the prompt's",
        "PromptCacheRO": "reads from disk but writes nothing",
        "NDraft": "maximum number of tokens drafted at a time, if the model was loaded with"
        " DraftModel, `mtp` or `prompt_lookup`; it does not change the output; 0 means the option"
        " `n_draft`, -1 no drafting",
        "Logprobs": "above 0: the log-probability of each generated token, in the model's"
        " distribution before bias, penalties, grammar and temperature",
        "TopLogprobs": "alternatives per token, up to 20; above 0 it implies Logprobs",
        "CorrelationId": "the first part of the request's name in the log, if it is a plain label",
        "ModelIdentity": "compared with the loaded model's identity first",
        "Embeddings": "the text to embed; used only by the Embedding RPC",
        "EmbeddingTokens": "the same as token ids, used unchanged; send one of the two",
    },
    refused={
        "TailFreeSamplingZ": Refused("send 1 and use TopP or MinP", _OFF_SHARE, _LATER),
        "Mirostat": Refused("send 0 and use TopP or MinP", one_of(0), _LATER),
        "NegativePrompt": Refused("leave it empty", EMPTY, _LATER),
    },
    neutral=each(
        {
            _DEVICE: "Threads MLock MMap MainGPU TensorSplit",
            f"{_CHUNK}; results do not change": "Batch",
            "applies when a context is shifted, and contexts are never shifted here": "NKeep",
            "fixed when the model is loaded": "F16KV RopeFreqBase RopeFreqScale",
            _LOG: "DebugMode Debug",
            "Penalty counts newlines like any other token, as in llama.cpp": "PenalizeNL",
            "belongs to Mirostat, which is refused": "MirostatETA MirostatTAU",
            "belongs to NegativePrompt, which is refused": "NegativePromptScale",
        }
    ),
)

MODEL_OPTIONS = FieldTable(
    used={
        "Model": "what to load: hub id, hub URL, or path",
        "ModelFile": "loaded if it exists",
        "ModelPath": "folder in which Model is searched",
        "ContextSize": "tokens of prompt plus output; 0 means as many as memory holds for one"
        " request, at most the model's own maximum",
        "MaxModelLen": "the same limit; the smaller one applies",
        "DType": "type of the weights: float32, float16, bfloat16 or auto",
        "TrustRemoteCode": "allows Python code in the checkpoint to run",
        "Embeddings": "requires a model that supports Embedding; others are refused",
        "Reranking": "requires a model that supports Rerank; others are refused. A Qwen3 model is"
        " loaded as a reranker",
        "Options": "options (docs/options.md) as `key:value`",
        "CacheTypeKey": "type of the KV cache: empty or `f16` (the model's own type), `q8_0`,"
        " `q5_0`, `q4_0` …; unknown names, and types that the model does not support, are refused",
        "CacheTypeValue": "the same for the values; the two may differ, such as `q8_0` and `q4_0`",
        "LoraAdapter": "an adapter of mlx-lm or PEFT: path, also below ModelPath, or hub id",
        "LoraAdapters": "further adapters; several are added up",
        "LoraScale": "multiplies the adapter's own scale; 0 means 1",
        "LoraScales": "the same, in the order of LoraAdapters",
        "DraftModel": "for speculative decoding: a smaller model with the same tokenizer, or an"
        " EAGLE-3 or DFlash checkpoint that was trained for this model",
        "LimitImagePerPrompt": "maximum number of Images in a request; 0 means 16",
        "LimitVideoPerPrompt": "maximum number of Videos in a request; 0 means 16",
        "LimitAudioPerPrompt": "maximum number of Audios in a request; 0 means 16",
        "EngineArgs": "the same options as a JSON object; an unknown key is an error",
    },
    refused={
        "LoraBase": Refused(
            "leave it empty", EMPTY, "adapters are applied to the weights of the model itself"
        ),
        "MMProj": Refused(
            "remove mmproj", EMPTY, "an MLX vision model includes its vision encoder"
        ),
        "Quantization": Refused(
            "choose a quantised checkpoint", EMPTY, "quantisation is part of an MLX checkpoint"
        ),
        "LoadFormat": Refused(
            "leave it empty", _empty_or_word("auto", "safetensors"), "only safetensors are read"
        ),
        "Tokenizer": Refused("leave it empty", EMPTY, "the checkpoint's own tokenizer is used"),
        "Overrides": Refused("edit the checkpoint's config.json", EMPTY, _LATER),
        "RopeScaling": Refused("leave it empty", _empty_or_word("none"), _ROPE),
        "RopeFreqBase": Refused("send 0", one_of(0), _ROPE),
        "RopeFreqScale": Refused("send 0", one_of(0, 1), _ROPE),
        "YarnExtFactor": Refused("send 0", one_of(0, -1), _ROPE),
        "YarnAttnFactor": Refused("send 0", one_of(0, 1), _ROPE),
        "YarnBetaFast": Refused("send 0", one_of(0, 32), _ROPE),
        "YarnBetaSlow": Refused("send 0", one_of(0, 1), _ROPE),
        "TensorParallelSize": Refused("send 0 or 1", one_of(0, 1), "one process serves the model"),
    },
    neutral=each(
        {
            "each request has its own": "Seed",
            _CHUNK: "NBatch",
            _DEVICE: "Threads MLock MMap NUMA LowVRAM NGPULayers MainGPU TensorSplit NoMulMatQ"
            " NoKVOffload EnforceEager SwapSpace",
            "DType, or else the platform, sets the type of weights and cache": "F16Memory",
            "MLX chooses its attention kernels itself": "FlashAttention",
            "Score is always available": "EnableScore",
            "the option memory_limit_mib limits memory": "GPUMemoryUtilization",
            "the value comes from the checkpoint's config.json": "RMSNormEps NGQA",
            _WHOLE: "GrammarTriggers",
            _LOG: "DisableLogStatus",
            "no host sets it": "VocabOnly",
            "a class name for another engine; the kind of model comes from the checkpoint": "Type",
            "for models that generate images": "PipelineType SchedulerType CUDA CFGScale IMG2IMG"
            " CLIPModel CLIPSubfolder CLIPSkip ControlNet",
            "for models that generate audio": "AudioPath",
            "for LocalAI's cloud proxy": "Proxy",
        }
    ),
)


def _without_media(rpc: str, field: str) -> dict[str, Refused]:
    """Return the fields that a call about one text, in `field`, does not read."""
    unread = f"{rpc} does not read it"
    media = Refused(f"send none, and text as {field}", why=unread)
    messages = Refused(f"render the conversation, and send it as {field}", why=unread)
    return {"Messages": messages, "Images": media, "Videos": media, "Audios": media}


TOKENIZE_STRING = FieldTable(_without_media("TokenizeString", "Prompt"))
EMBEDDING = FieldTable(
    _without_media("Embedding", "Embeddings")
    | {"Prompt": Refused("send it as Embeddings", why="Embedding does not read it")}
)
TRANSCRIPT_REQUEST = FieldTable(
    used={
        "dst": "the recording: the path of a file that the host has stored, base64 or a data URI;"
        " WAV, FLAC, OGG, MP3, M4A, MP4, WebM or AAC, up to two hours",
        "language": "a code such as `en`, or an English name; empty or `auto`: the model detects"
        " it (Canary: English). Parakeet, Voxtral Realtime, GLM-ASR and Moonshine always detect"
        " it, and Granite Speech translates from any; a model that accepts audio reads it in its"
        " prompt",
        "translate": "into English: multilingual Whisper models, Granite Speech, Canary, and models"
        " that accept audio; refused for others",
        "prompt": "earlier text, or words that may occur: Whisper, Qwen3-ASR, and Granite Speech,"
        " which takes it as keywords; other speech-to-text models read none. For a model that"
        " accepts audio, it replaces the question",
        "temperature": "0 is greedy, and Whisper tries higher ones where its text repeats itself or"
        " is improbable; above 0 it is refused for Parakeet and SenseVoice",
        "timestamp_granularities": "`segment`, and `word` for Whisper and Parakeet",
        "ModelIdentity": "compared with the loaded model's identity first",
    },
    refused={},
    neutral={
        "threads": _DEVICE,
        "diarize": "speakers are not distinguished, and `speaker` stays empty; hosts set it for"
        " every request",
        "stream": "the RPC decides",
    },
)


def render() -> str:
    """Return the tables of docs/fields.md."""
    keys = {f"{PREFIX}{name}": key.meaning for name, key in KEYS.items()}.items()
    predict, model = pb.PredictOptions, pb.ModelOptions
    return "\n".join(
        (
            _table("PredictOptions", "field | treatment", _rows(predict, PREDICT_OPTIONS)),
            _table("Metadata of a request", "key | meaning", keys),
            _table("ModelOptions", "field | treatment", _rows(model, MODEL_OPTIONS)),
            _table(
                "TranscriptRequest",
                "field | treatment",
                _rows(pb.TranscriptRequest, TRANSCRIPT_REQUEST),
            ),
        )
    )


def _rows(message: type[Any], table: FieldTable) -> Iterator[tuple[str, str]]:
    """Yield each field in message order, and its treatment in Markdown."""
    for name in (field.name for field in message.DESCRIPTOR.fields):
        if name in table.used:
            yield name, f"**honoured**: {table.used[name]}"
        elif row := table.refused.get(name):
            yield name, f"**refused** unless it is {row.off.words}: {row.why}; {row.instead}"
        else:
            yield name, f"no effect: {table.neutral[name]}"


def _table(title: str, columns: str, rows: Iterable[tuple[str, str]]) -> str:
    lines = (f"| `{name}` | {words} |\n" for name, words in rows)
    return f"## {title}\n\n| {columns} |\n|---|---|\n{''.join(lines)}"


# Fields that a model file cannot set: they belong to a request, or locate the model.
_WITHOUT_KEY = frozenset(
    "Prompt Messages UseTokenizerTemplate Metadata Images Videos Audios Tools ToolChoice Grammar"
    " CorrelationId ModelIdentity EmbeddingTokens Model ModelFile ModelPath".split()
)
# Keys that are not the field's name in snake case: those of ModelOptions, then those of requests.
_OTHER_KEYS = MODEL_KEYS | {
    "LimitImagePerPrompt": "limit_mm_per_prompt.image",
    "LimitVideoPerPrompt": "limit_mm_per_prompt.video",
    "LimitAudioPerPrompt": "limit_mm_per_prompt.audio",
    "Tokens": "max_tokens",
    "StopPrompts": "stopwords",
    "Penalty": "repeat_penalty",
    "Repeat": "repeat_last_n",
    "NDraft": "n_draft",
    "TailFreeSamplingZ": "tfz",
}
# The author of a model file, or of a request with the same names, does not know the protocol. So
# messages contain both names: `context_size (ContextSize)`.
YAML_KEYS: Mapping[str, str] = {
    name: _OTHER_KEYS.get(name, in_snake_case(name))
    for table in (MODEL_OPTIONS, PREDICT_OPTIONS)
    for name in (*table.used, *table.refused)
    if name not in _WITHOUT_KEY
}


def message_with_keys(message: str) -> str:
    """Return the message for a host, with the YAML key at the first mention of each field."""
    seen: set[str] = set()

    def name_of(field: str) -> str:
        first = field in YAML_KEYS and field not in seen
        seen.add(field)
        return f"{YAML_KEYS[field]} ({field})" if first else field

    return written(message, name_of)


if __name__ == "__main__":
    print(render(), end="")
