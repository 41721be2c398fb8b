"""docs/fields.md: what becomes of every field of PredictOptions and ModelOptions.

What is refused, and what means nothing, is taken from the tables that the code decides by; how a
field is honoured is said here. A test walks the descriptors, so a new field needs a row.
"""

from __future__ import annotations

from collections.abc import Mapping

from backend.rpc import load_options, request_fields
from backend.rpc.neutral import Refused
from wire import backend_pb2 as pb

PREDICT: Mapping[str, str] = {
    "Prompt": "goes to the model as it is, unless Messages are rendered; a BOS is added only where"
    " the text has none",
    "Messages": "rendered by the model's chat template when UseTokenizerTemplate is set",
    "UseTokenizerTemplate": "renders Messages, if there are any, whatever Prompt holds",
    "Metadata": "`enable_thinking`, `reasoning_effort` and `chat_template_kwargs` reach the chat"
    " template; keys that begin with `mlx.` are the settings below; other keys are labels of"
    " clients and mean nothing",
    "Images": "shown to a model that takes images, before the words of the last user's message, or"
    " where `mlx.image_messages` says (docs/vision.md); else refused",
    "Audios": "the same with sounds and `mlx.audio_messages`",
    "Videos": "none is decoded: one is refused, and its frames may be sent as Images",
    "Tools": "shown by the chat template, or told in words where that shows none (docs/formats.md);"
    " answers that call one become tool-call deltas; with a tool that is `strict`, calls are held"
    " to the schemas by a grammar",
    "ToolChoice": "`none` hides the tools; `required` and a named function are enforced by a"
    " grammar in the format in which the model's calls are read",
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
    "LogitBias": "JSON object, token id → what is added to its logit; an id that the model does"
    " not have is an error",
    "Grammar": "GBNF, or a JSON schema as a JSON object, that the answer must match; reasoning may"
    " come before it where the model thinks",
    "PromptCachePath": "an absolute path: the file that keeps a conversation's KV over a restart;"
    " empty leaves it to the folder of `prompt_cache_dir`, if there is one",
    "PromptCacheAll": "keeps the answer's KV on disk as well, not the prompt's alone",
    "PromptCacheRO": "reads from disk, and writes nothing",
    "NDraft": "most tokens guessed at a time, where the model was loaded with DraftModel or"
    " `prompt_lookup`; the output does not depend on it; 0 leaves it to `n_draft`",
    "Logprobs": "above 0: a log-probability per generated token, of the model's distribution"
    " before bias, penalties, grammar and temperature",
    "TopLogprobs": "alternatives per token, up to 20; above 0 it asks for Logprobs as well",
    "CorrelationId": "leads the request's name in the log, if it is only a label",
    **request_fields.ELSEWHERE,
}

LOAD: Mapping[str, str] = {
    "Model": "what to load: hub id, hub URL, or path",
    "ModelFile": "served if it exists",
    "ModelPath": "folder in which Model is looked for",
    "ContextSize": "tokens of prompt plus output; 0 means the model's own maximum",
    "MaxModelLen": "the same bound; the smaller one counts",
    "DType": "type of the weights: float32, float16, bfloat16 or auto",
    "TrustRemoteCode": "allows Python code that comes with the checkpoint",
    "Embeddings": "Embedding is to be answered: a model that cannot is refused",
    "Reranking": "Rerank is to be answered: a Qwen3 model is loaded as a reranker, and a model that"
    " cannot is refused",
    "Options": "settings of docs/options.md, as `key:value`",
    "CacheTypeKey": "form of the KV cache: empty, `f16` (as the model computes), `q8_0`, `q5_0`,"
    " `q4_0` …; a name or a model that it cannot be done for is refused",
    "CacheTypeValue": "the same as CacheTypeKey: MLX has one form for both",
    "LoraAdapter": "an mlx-lm adapter: absolute path, path under ModelPath, or hub id",
    "LoraAdapters": "further ones; several add up",
    "LoraScale": "multiplies the adapter's own scale; 0 means 1",
    "LoraScales": "the same, in the order of LoraAdapters",
    "DraftModel": "a smaller model of the same tokenizer that guesses ahead while one request runs",
    "LimitImagePerPrompt": "most Images of a request; 0 means 16",
    "LimitAudioPerPrompt": "most Audios of a request; 0 means 16",
    "LimitVideoPerPrompt": "most Videos of a request; 0 means 16, and none is decoded",
    "EngineArgs": "the same settings as a JSON object; an unknown key fails",
}

EXTRAS: Mapping[str, str] = {
    "mlx.min_tokens": "tokens before which the answer cannot end",
    "mlx.xtc_probability": "XTC sampling: chance per token, from 0 to 1",
    "mlx.xtc_threshold": "XTC sampling: share of probability from which a token counts as likely",
    "mlx.presence_window": "PresencePenalty counts among so many last tokens of prompt and output;"
    " 0: the whole output, and nothing of the prompt",
    "mlx.frequency_window": "the same for FrequencyPenalty",
    "mlx.grammar_type": "how Grammar is read: `auto`, `gbnf`, `json_schema`, `lark` or `regex`",
    "mlx.parallel_tool_calls": "`false`: a demanded tool call is a single one",
    "mlx.grammar_or_calls": "`true`: Grammar holds what is said, and the offered tools may be"
    " called instead, as ToolChoice allows; without it Grammar is the whole wish",
    "mlx.stream_logprobs": "`true`: where log-probabilities are asked for, each Reply of a stream"
    " carries those of the tokens behind it, and the last one what is left, not all of them",
    "mlx.prompt_token_ids": "JSON list of token ids: the raw prompt, in place of Prompt; no BOS is"
    " added",
    "mlx.prompt_logprobs": "`true`: the last Reply's `logprobs` have a list `prompt` beside"
    " `content`, one entry per token of the raw prompt, with TopLogprobs alternatives; `text` is"
    " what the token adds to the text, and the first `logprob` is null",
    "mlx.prompt_only": "`true`: the prompt is read and nothing is generated, whatever Tokens says;"
    " the finish reason is `length`",
    "mlx.count_only": "`true`: nothing is computed; `prompt_tokens` counts the prompt, which may be"
    " longer than the context",
    "mlx.continue_final_message": "`true`: the last of Messages is an answer that was begun, and"
    " the model goes on with its text",
    "mlx.image_messages": "JSON list: for each of Images the message that it belongs to, counted"
    " from 0",
    "mlx.audio_messages": "the same for Audios",
}


def render() -> str:
    """The tables in Markdown."""
    predict = _table(
        pb.PredictOptions.DESCRIPTOR, PREDICT, request_fields.REFUSED, request_fields.UNUSED
    )
    load = _table(pb.ModelOptions.DESCRIPTOR, LOAD, load_options.REFUSED, load_options.UNUSED)
    extras = "".join(f"| `{name}` | {how} |\n" for name, how in EXTRAS.items())
    return (
        f"## PredictOptions\n\n{predict}\n"
        f"## Metadata of a request\n\n| key | meaning |\n|---|---|\n{extras}\n"
        f"## ModelOptions\n\n{load}"
    )


def _table(
    descriptor: object,
    honoured: Mapping[str, str],
    refused: Mapping[str, Refused],
    unused: Mapping[str, str],
) -> str:
    rows = ["| field | what becomes of it |\n|---|---|\n"]
    for field in descriptor.fields:  # type: ignore[attr-defined]
        name = field.name
        if name in honoured:
            rows.append(f"| `{name}` | **honoured**: {honoured[name]} |\n")
        elif name in refused:
            entry = refused[name]
            rows.append(
                f"| `{name}` | **refused** unless it is {entry.neutral.words}: {entry.why};"
                f" {entry.instead} |\n"
            )
        else:
            rows.append(f"| `{name}` | no meaning: {unused[name]} |\n")
    return "".join(rows)


if __name__ == "__main__":
    print(render(), end="")
