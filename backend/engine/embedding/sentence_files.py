"""Reads what the files of sentence-transformers state about inputs, pooling and scores.

modules.json lists the steps of a checkpoint. Each step may have a folder with its configuration.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, cast

from backend.engine.embedding.encoder_shape import family_of, shape_of
from backend.engine.embedding.kind import FAMILIES, is_causal, is_jina_v4, is_static
from backend.engine.errors import InvalidRequest, Unusable
from backend.engine.settings import Settings
from common.model_kind import ModelKind
from common.wording import shown

# The configuration of the Transformer step has had several names.
_TRANSFORMER = tuple(
    f"sentence_{family}_config.json"
    for family in ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
)
_STATED = "config_sentence_transformers.json"


# What an input may be → names of its prompt. As in sentence-transformers, every model has the
# prompts `query` and `document`, which are empty unless the checkpoint states them.
INPUT_TYPES: Mapping[str, tuple[str, ...]] = {
    "query": ("query", "search_query", "retrieval.query"),
    "document": ("document", "passage", "corpus", "search_document", "retrieval.passage"),
}
Mode = Literal["cls", "mean", "max", "last", "weighted_mean", "mean_sqrt_len", "none"]
# Names in sentence-transformers 5, and flags in earlier versions (without `pooling_mode_`) → modes.
# The vectors of several flags are joined in the order of this table.
_MODES: Mapping[tuple[str, str], Mode] = {
    ("cls", "cls_token"): "cls",
    ("max", "max_tokens"): "max",
    ("mean", "mean_tokens"): "mean",
    ("mean_sqrt_len_tokens", "mean_sqrt_len_tokens"): "mean_sqrt_len",
    ("weightedmean", "weightedmean_tokens"): "weighted_mean",
    ("lasttoken", "lasttoken"): "last",
}
# The modes of checkpoints that state none; `mean` for other families. In a causal model, it is
# `last`, because only the last token attends to the whole text.
_FAMILY: Mapping[str, Mode] = {"lfm2": "cls", "new": "cls", "gte": "cls"}


@dataclass(frozen=True, slots=True)
class Prompts:
    """Texts to put in front of an input."""

    default: str = ""  # the prompt of requests that name none
    named: Mapping[str, str] = field(default_factory=dict)  # prompts by name
    pooled: bool = True  # whether the tokens of prompts are pooled

    def chosen(self, name: str | None, input_type: str) -> str:
        """Return the prompt of a request. Raises InvalidRequest.

        name: the prompt's name; None if the request names none.
        input_type: a key of INPUT_TYPES, to use the first prompt with one of its names, or none if
            there is none of them; "" for the default prompt.
        """
        if name is None and not input_type:
            return self.default
        if name is not None and name not in self.named and name not in INPUT_TYPES:
            raise InvalidRequest(unknown_prompt(name, self.named), "prompt_name")
        names = INPUT_TYPES[input_type] if name is None else (name,)
        return next((self.named[each] for each in names if each in self.named), "")


@dataclass(frozen=True, slots=True)
class Answers:
    """The tokens whose logits make a score: the logit of `yes` minus the logit of `no`, if any."""

    yes: int
    no: int | None = None


@dataclass(frozen=True, slots=True)
class Messages:
    """How inputs become messages for the chat template."""

    arguments: Mapping[str, Any]  # arguments of the template
    parts: bool  # whether the content of a message is a list of parts instead of a string


@dataclass(frozen=True, slots=True)
class SentenceFiles:
    """The JSON files of a checkpoint's folder."""

    path: Path

    def value(self, file: str) -> Any:
        """Return the JSON in a file; None if there is no such file. Raises Unusable."""
        try:
            return json.loads((self.path / file).read_bytes())
        except FileNotFoundError:
            return None
        except (ValueError, RecursionError):
            raise Unusable(f"{file} is not valid JSON") from None

    def object(self, file: str) -> Mapping[str, Any]:
        """Return the JSON object in a file; empty without such an object. Raises Unusable."""
        value = self.value(file)
        return value if isinstance(value, dict) else {}

    @property
    def steps(self) -> list[tuple[str, str]] | None:
        """The kind and the folder of each step in modules.json; None without this file.

        Raises Unusable.
        """
        modules = self.value("modules.json")
        if not isinstance(modules, list):
            return None
        if not all(isinstance(module, dict) for module in modules):
            raise Unusable("its modules.json is not a list of objects")
        return [
            (str(module.get("type", "")).rpartition(".")[2], Path(str(module.get("path", ""))).name)
            for module in modules
        ]

    @property
    def late_interaction(self) -> bool:
        """Whether the steps return the vectors of tokens, as ColBERT and PyLate do."""
        modules = self.value("modules.json")
        kinds = [str(module.get("type")) for module in modules or () if isinstance(module, dict)]
        return any("MultiVector" in kind or kind.startswith("pylate.") for kind in kinds)

    @property
    def transformer(self) -> Mapping[str, Any]:
        """The configuration of the Transformer step; empty without one."""
        return next(filter(None, map(self.object, _TRANSFORMER)), {})


def prompts_of(files: SentenceFiles, settings: Settings) -> Prompts:
    """Return the checkpoint's prompts. Raises Unusable, and InvalidRequest for prompt_name."""
    stated = files.object(_STATED)
    named = stated.get("prompts") or {}
    if not isinstance(named, dict) or not all(isinstance(text, str) for text in named.values()):
        raise Unusable(f"prompts in its {_STATED} is not a map of texts")
    known = {**dict.fromkeys(INPUT_TYPES, ""), **named}
    if settings.prompt_name and settings.prompt_name not in known:
        raise InvalidRequest(unknown_prompt(settings.prompt_name, named))
    default = settings.prompt_name or stated.get("default_prompt_name")
    if default is not None and (not isinstance(default, str) or default not in known):
        raise Unusable(
            f"default_prompt_name in its {_STATED} is {shown(default)}, which is not among its"
            " prompts"
        )
    left_out = any(
        files.object(f"{folder.name}/config.json").get("include_prompt") is False
        for folder in files.path.glob("*Pooling")
    )
    return Prompts(named.get(default, ""), named, pooled=not left_out)


def unknown_prompt(wanted: str, named: Mapping[str, str]) -> str:
    """Return the message for a name that is not the name of a model's prompt."""
    names = ", ".join(map(shown, named))
    there = f"the model's prompts are {names}" if named else "the model has no prompts"
    return f"prompt_name is {shown(wanted)}, but {there}: send one of these, or leave it out"


def answers_of(files: SentenceFiles) -> Answers | None:
    """Return the tokens that the step LogitScore compares; None without this step.

    Raises Unusable.
    """
    for file in files.path.glob("*LogitScore/config.json"):
        stated = files.object(f"{file.parent.name}/{file.name}")
        yes, no = stated.get("true_token_id"), stated.get("false_token_id")
        if type(yes) is not int or type(no) not in (int, type(None)):
            raise Unusable(
                f"its LogitScore step compares the tokens {shown(yes)} and {shown(no)}, which are"
                " not token ids"
            )
        return Answers(yes, no)
    return None


def messages_of(stated: Mapping[str, Any]) -> Messages | None:
    """Return how inputs become messages; None if inputs are not rendered as messages."""
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


def score_function(files: SentenceFiles, config: Mapping[str, Any]) -> str:
    """Return the function that turns a reranker's logits into scores: the last part of its name."""
    legacy = config.get("sentence_transformers")
    for function in (
        files.object(_STATED).get("activation_fn"),
        legacy.get("activation_fn") if isinstance(legacy, dict) else None,
        config.get("sbert_ce_default_activation_function"),
    ):
        if str(function).startswith("torch."):  # other names are of code, which is not run
            return str(function).rpartition(".")[2]
    return "Sigmoid"


def scores_pairs(files: SentenceFiles) -> bool:
    """Return whether the last step is a Dense layer that computes a reranker's score."""
    kind, folder = (files.steps or [("", "")])[-1]
    stated = files.object(f"{folder}/config.json") if kind == "Dense" else {}
    return stated.get("module_output_name") == "scores"


def is_reranker(files: SentenceFiles) -> bool:
    """Return whether the files of sentence-transformers say that a model scores pairs."""
    return files.object(_STATED).get("model_type") == "CrossEncoder" or scores_pairs(files)


def sequence_limit(files: SentenceFiles, config: Mapping[str, Any]) -> int:
    """Return the checkpoint's maximum sequence length in tokens; 0 if it states none."""
    if is_static(config):
        truncation = files.object("tokenizer.json").get("truncation")
        return int(truncation["max_length"]) if isinstance(truncation, dict) else 0
    limits: list[int] = []
    if family_of(config):
        limits.append(shape_of(config).longest)
    for limit in (
        files.transformer.get("max_seq_length"),
        files.object("tokenizer_config.json").get("model_max_length"),
    ):
        if type(limit) is int and 0 < limit < 1 << 30:
            limits.append(limit)
            break
    return min(limits, default=0)


@dataclass(frozen=True, slots=True)
class PoolingRule:
    """How the vectors of a text's tokens become the answer."""

    # Poolings whose vectors are joined; `none` returns the vectors of all tokens.
    modes: tuple[Mode, ...]
    normalize: bool  # whether each vector is scaled to length 1
    dimensions: int | None = None  # how many numbers of each vector are returned; None means all

    @property
    def per_token(self) -> bool:
        """Whether the result is a vector for each token."""
        return self.modes == ("none",)


def pooling_of_text_model(settings: Settings) -> PoolingRule:
    """Return the rule for a generative model: by default, the last token, scaled to length 1."""
    return _overridden(PoolingRule(("last",), True), settings)


def pooling_of_checkpoint(
    files: SentenceFiles, config: Mapping[str, Any], settings: Settings
) -> PoolingRule:
    """Return the rule of an embedding checkpoint, overridden by the user's options.

    Raises Unusable for steps that are not supported.
    """
    # The code of jina-embeddings-v4 pools and scales in its first step.
    pools_itself, model_type = is_jina_v4(config), str(config["model_type"])
    generates = model_type not in FAMILIES[ModelKind.EMBEDDING] and is_causal(config)
    family: Mode = "last" if generates and not pools_itself else _FAMILY.get(model_type, "mean")
    if (steps := files.steps) is None:
        return _overridden(PoolingRule(_modes(files, "1_Pooling") or (family,), True), settings)
    if files.late_interaction:
        if settings.pooling != "none":
            raise Unusable(
                "it is a late-interaction model (ColBERT), which returns a vector for each token:"
                " set the option pooling:none to get these"
            )
        return PoolingRule(("none",), normalize=settings.normalize is not False)
    modes: tuple[Mode, ...] = (family,)
    normalize, pooled = pools_itself, False
    for kind, folder in steps:
        if kind == "Pooling":
            found = _modes(files, folder)
            if found is None and not settings.pooling:
                raise _unpooled(f"{folder}/config.json, which its modules.json names")
            modes = found or modes
        elif kind == "Normalize":
            normalize = True
        elif kind in ("Dense", "LayerNorm"):
            normalize = False
        elif kind == "SpladePooling":
            raise Unusable(
                "its vectors are sparse (the step SpladePooling in its modules.json), which is not"
                " supported: load a model with dense vectors"
            )
        elif kind not in ("Transformer", "StaticEmbedding", "Dropout"):
            raise Unusable(f"the step {shown(kind)} in its modules.json is not supported")
        pooled = pooled or kind in ("Pooling", "StaticEmbedding")
    if not (pooled or pools_itself or settings.pooling):
        raise _unpooled("the step Pooling in modules.json")
    size = files.object(_STATED).get("truncate_dim")
    kept = size if type(size) is int and size > 0 else None
    return _overridden(PoolingRule(modes, normalize, kept), settings)


def _unpooled(missing: str) -> Unusable:
    return Unusable(
        f"it lacks {missing}, so how its vectors are pooled is unknown: copy the file from the"
        " model that it was made from, or set the option pooling"
    )


def _overridden(rule: PoolingRule, settings: Settings) -> PoolingRule:
    """Return the rule with the options `pooling` and `normalize` applied.

    Vectors of tokens are not normalised by default, because hosts pool and normalise them.
    """
    if settings.pooling:
        rule = replace(rule, modes=(cast(Mode, settings.pooling),))
    normalize = rule.normalize and not rule.per_token
    return replace(rule, normalize=normalize if settings.normalize is None else settings.normalize)


def _modes(files: SentenceFiles, folder: str) -> tuple[Mode, ...] | None:
    """Return the modes in a Pooling step's configuration; None if there is no configuration."""
    stated = files.value(f"{folder}/config.json")
    if not isinstance(stated, dict):
        return None
    named = stated.get("pooling_mode")
    if named is None:
        flags = (mode for (_, flag), mode in _MODES.items() if stated.get(f"pooling_mode_{flag}"))
        return tuple(flags) or ("mean",)
    modes = {name: mode for (name, _), mode in _MODES.items()}
    names = named if isinstance(named, list) else [named]
    for name in names:
        if not isinstance(name, str) or name not in modes:
            raise Unusable(f"its pooling {shown(name)} is not supported")
    return tuple(modes[name] for name in names) or ("mean",)
