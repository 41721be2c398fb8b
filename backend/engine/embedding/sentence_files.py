"""What the files of sentence-transformers state about a checkpoint's inputs and scores."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from backend.engine.embedding.encoder_shape import family_of, shape_of
from backend.engine.errors import InvalidRequest, ModelRejected
from backend.engine.settings import Settings
from common.wording import shown

# The names that the file of the Transformer step has had, by the family of the first models.
_TRANSFORMER = tuple(
    f"sentence_{family}_config.json"
    for family in ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
)
# The last parts of the names of PyTorch's functions, in the two places where a score's is stated.
_RAW, _LOGISTIC = "Identity", "Sigmoid"
# Families of mlx-lm whose layers attend further than the reference's, in texts beyond the window.
_WITHOUT_WINDOW = ("gemma2", "mistral")


@dataclass(frozen=True, slots=True)
class Prompts:
    """Texts to put in front of an input.

    default: of inputs whose request names no prompt. pooled: whether their tokens are pooled.
    """

    default: str = ""
    named: Mapping[str, str] = field(default_factory=dict)
    pooled: bool = True


@dataclass(frozen=True, slots=True)
class Answers:
    """The tokens whose logits make a score: the first one's, less that of the second, if any."""

    yes: int
    no: int | None


@dataclass(frozen=True, slots=True)
class Messages:
    """How inputs become messages for the chat template.

    arguments: of the template. parts: whether a content is a list of parts instead of a string.
    """

    arguments: Mapping[str, Any]
    parts: bool


def read_json(file: Path, name: str) -> Any:
    """Return the JSON in a file; None if there is no such file. Raises ModelRejected."""
    try:
        return json.loads(file.read_bytes())
    except FileNotFoundError:
        return None
    except (ValueError, RecursionError):
        raise ModelRejected.because(
            name, f"{file.parent.name}/{file.name} is not valid JSON"
        ) from None


def transformer_config(path: Path, name: str) -> Mapping[str, Any]:
    """Return the configuration of the Transformer step; empty without one. Raises ModelRejected."""
    for file in _TRANSFORMER:
        if isinstance(stated := read_json(path / file, name), dict):
            return stated
    return {}


def prompts_of(path: Path, name: str, settings: Settings) -> Prompts:
    """Return the checkpoint's prompts. Raises ModelRejected, and InvalidRequest for prompt_name."""
    stated = read_json(path / "config_sentence_transformers.json", name)
    stated = stated if isinstance(stated, dict) else {}
    named = stated.get("prompts") or {}
    if not isinstance(named, dict) or not all(isinstance(text, str) for text in named.values()):
        raise ModelRejected.because(
            name, "prompts in its config_sentence_transformers.json is not a map of texts"
        )
    if settings.prompt_name and settings.prompt_name not in named:
        raise InvalidRequest(unknown_prompt(settings.prompt_name, named))
    default = settings.prompt_name or stated.get("default_prompt_name")
    if default is not None and default not in named:
        raise ModelRejected.because(
            name,
            f"default_prompt_name in its config_sentence_transformers.json is {shown(default)},"
            " which is not among its prompts",
        )
    pooling = [read_json(file, name) for file in path.glob("*Pooling/config.json")]
    left_out = any(isinstance(one, dict) and one.get("include_prompt") is False for one in pooling)
    return Prompts(named.get(default, ""), named, pooled=not left_out)


def unknown_prompt(wanted: str, named: Mapping[str, str]) -> str:
    """Return the message for a name that is not among a model's prompts."""
    names = ", ".join(map(shown, named))
    there = f"the model's prompts are {names}" if named else "the model has no prompts"
    return f"prompt_name is {shown(wanted)}, but {there}: send one of these, or leave it out"


def answers_of(path: Path, name: str) -> Answers | None:
    """Return the tokens that the step LogitScore compares; None without it.

    Raises ModelRejected.
    """
    for file in path.glob("*LogitScore/config.json"):
        stated = read_json(file, name)
        stated = stated if isinstance(stated, dict) else {}
        yes, no = stated.get("true_token_id"), stated.get("false_token_id")
        if type(yes) is not int or type(no) not in (int, type(None)):
            raise ModelRejected.because(
                name,
                f"its LogitScore step compares the tokens {shown(yes)} and {shown(no)}, which are"
                " not token ids",
            )
        return Answers(yes, no)
    return None


def messages_of(stated: Mapping[str, Any]) -> Messages | None:
    """Return how inputs become messages; None if they are plain texts.

    stated: the configuration of the Transformer step.
    """
    modalities = stated.get("modality_config")
    message = modalities.get("message") if isinstance(modalities, dict) else None
    if not isinstance(message, dict):
        return None
    processing = stated.get("processing_kwargs")
    arguments = processing.get("chat_template") if isinstance(processing, dict) else None
    arguments = dict(arguments) if isinstance(arguments, dict) else {}
    for size in ("padding", "truncation", "max_length", "return_tensors", "restore_suffix"):
        arguments.pop(size, None)
    return Messages(arguments, parts=message.get("format", "structured") != "flat")


def scores_are_raw(path: Path, name: str, config: Mapping[str, Any]) -> bool:
    """Whether a reranker's scores are its logits; otherwise the logistic function is applied.

    Raises ModelRejected for another function.
    """
    stated = read_json(path / "config_sentence_transformers.json", name)
    legacy = config.get("sentence_transformers")
    for function in (
        stated.get("activation_fn") if isinstance(stated, dict) else None,
        legacy.get("activation_fn") if isinstance(legacy, dict) else None,
        config.get("sbert_ce_default_activation_function"),
    ):
        if not str(function).startswith("torch."):  # others are code that is not run
            continue
        last = str(function).rpartition(".")[2]
        if last not in (_RAW, _LOGISTIC):
            raise ModelRejected.because(
                name,
                f"the function of its scores (activation_fn) is {shown(function)}, but only"
                f" {_LOGISTIC} and {_RAW} are supported",
            )
        return last == _RAW
    return False


def sequence_limit(path: Path, name: str, config: Mapping[str, Any]) -> int:
    """The checkpoint's maximum sequence length in tokens; 0 if it states none."""
    limits: list[int] = []
    if family_of(config):
        limits.append(shape_of(name, config).longest)
    elif config["model_type"] in _WITHOUT_WINDOW and type(config.get("sliding_window")) is int:
        limits.append(config["sliding_window"])
    tokenizer = read_json(path / "tokenizer_config.json", name)
    for source, key in (
        (transformer_config(path, name), "max_seq_length"),
        (tokenizer, "model_max_length"),
    ):
        limit = source.get(key) if isinstance(source, dict) else None
        if type(limit) is int and 0 < limit < 1 << 30:
            limits.append(limit)
            break
    return min(limits, default=0)
