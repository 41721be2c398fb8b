"""The body of `/completions`: prompts that are continued without a template.

It becomes `n` PredictOptions for each prompt, in the order of the choices.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from pydantic import Field
from pydantic_core import to_json

from common.field_names import named
from gateway import fields
from gateway.described import about
from gateway.errors import bad_field
from gateway.fields import TextRequest
from gateway.models.config import ModelConfig
from gateway.openai.answer_format import FormatFields, constraint_of, write_constraint
from gateway.openai.sampling import (
    MOST_ALTERNATIVES,
    MOST_TOKENS,
    SamplingFields,
    agreed,
    most_tokens,
    require_few,
    seed_of,
    write_sampling,
)
from wire import backend_pb2 as pb

MOST_PROMPTS = 2048
MOST_ANSWERS = 4096
Prompt = str | Sequence[int]
Token = Annotated[int, Field(ge=0, le=MOST_TOKENS)]
Tokens = Annotated[list[Token], Field(min_length=1, fail_fast=True)]
Prompts = Annotated[list[str | Tokens], Field(min_length=1, max_length=MOST_PROMPTS)]


class CompletionRequest(SamplingFields, FormatFields, TextRequest):
    """OpenAI's legacy completion request, with the fields of the local servers."""

    others = fields.COMPLETION
    most_by_default: ClassVar[int] = 16  # tokens of an answer, OpenAI's default for completions

    prompt: str | Prompts | Tokens = Field(
        description="A text, its tokens, or a list of these; a list runs as one batch."
    )
    suffix: str | None = about("Text after the answer, for fill-in-the-middle.")
    echo: bool | None = about("Whether the prompt is returned before the answer.")
    best_of: int | None = about("Must equal n.", ge=1, le=128)
    logprobs: bool | Annotated[int, Field(ge=-1, le=MOST_ALTERNATIVES)] | None = about(
        "Log-probabilities, with this number of alternatives; -1: none (mlx_lm.server's default)."
    )

    def before(self) -> str | Prompts | Tokens:
        """Return the text or tokens to continue."""
        return self.prompt

    def infill(self) -> dict[str, Any] | None:
        """Return the suffix and other files for fill-in-the-middle; None if there are none."""
        return {"suffix": self.suffix, "files": []} if self.suffix else None


@dataclass(frozen=True, slots=True)
class CompletionPlan:
    """The backend's requests, and what the answer must contain."""

    wanted: list[pb.PredictOptions]
    prompts: list[Prompt]
    per_prompt: int  # answers to each prompt
    echo: bool
    logprobs: int | None  # alternatives per token; None if no log-probabilities are sent
    request: CompletionRequest

    def text_of(self, choice: int) -> str:
        """Return the text of a choice's prompt; "" for a prompt of tokens."""
        prompt = self.prompts[choice // self.per_prompt]
        return prompt if isinstance(prompt, str) else ""


def completion_plan(request: CompletionRequest, config: ModelConfig) -> CompletionPlan:
    """Return the plan of a request, without ModelIdentity. Raises ApiError with `param`."""
    prompts = _prompts(request)
    count = _answers_per_prompt(request, len(prompts))
    asked = request.logprobs  # OpenAI's number of alternatives; 0 means the chosen tokens alone
    off = asked is None or asked is False or asked < 0
    alternatives = None if off else 0 if asked is True else asked
    logprobs = agreed(("logprobs", alternatives), ("n_probs", request.n_probs or None))
    first = _common_options(request, config, logprobs)
    require_few(first, count * len(prompts))
    return CompletionPlan(
        wanted=[
            _options_of(first, prompt, seed_of(request, config, index), request, logprobs)
            for prompt in prompts
            for index in range(count)
        ],
        prompts=prompts,
        per_prompt=count,
        echo=bool(request.echo),
        logprobs=logprobs,
        request=request,
    )


def _prompts(request: CompletionRequest) -> list[Prompt]:
    given = request.before()
    filling = request.infill() is not None
    if isinstance(given, str):
        return [given if filling else _require_filled(given, "prompt")]
    if filling:
        raise bad_field(f"{named('suffix')} needs a prompt that is one string: send one")
    if isinstance(given[0], int):
        return [given]
    return [_require_filled(prompt, f"prompt[{index}]") for index, prompt in enumerate(given)]


def _require_filled(prompt: Prompt, place: str) -> Prompt:
    if not prompt:
        raise bad_field(f"{named(place)} is empty: send a text or tokens to continue")
    return prompt


def _answers_per_prompt(request: CompletionRequest, prompts: int) -> int:
    count = request.n or 1
    if request.best_of is not None and request.best_of != count:
        raise bad_field(
            f"{named('best_of')} is {request.best_of} and n is {count}: answers are not ranked, so"
            " send n and choose among them",
            "unsupported_parameter",
        )
    if count * prompts > MOST_ANSWERS:
        raise bad_field(
            f"{prompts} prompts with {named('n')} {count} are {count * prompts} answers: ask for"
            f" at most {MOST_ANSWERS} at a time"
        )
    return count


def _common_options(
    request: CompletionRequest, config: ModelConfig, logprobs: int | None
) -> pb.PredictOptions:
    options = pb.PredictOptions()
    write_sampling(options, request, config)
    write_constraint(options, constraint_of(request))
    options.Tokens = most_tokens(
        config.parameters.max_tokens or request.most_by_default,
        ("max_tokens", request.max_tokens),
        ("n_predict", request.n_predict),
    )
    if 0 in (request.max_tokens, request.n_predict):
        options.Metadata["mlx.prompt_only"] = "true"
    if logprobs is not None:
        options.Logprobs = 1
        options.TopLogprobs = min(logprobs, MOST_ALTERNATIVES)
        options.Metadata["mlx.stream_logprobs"] = "true"
    return options


def _options_of(
    first: pb.PredictOptions,
    prompt: Prompt,
    seed: int,
    request: CompletionRequest,
    logprobs: int | None,
) -> pb.PredictOptions:
    options = pb.PredictOptions()
    options.CopyFrom(first)
    options.Seed = seed
    if isinstance(prompt, str):
        options.Prompt = prompt
        if (infill := request.infill()) is not None:
            options.Metadata["mlx.infill"] = json.dumps(infill)
    else:
        options.Metadata["mlx.prompt_token_ids"] = to_json(prompt).decode()
    # For a prompt of tokens, `echo` also takes the prompt's text from its log-probabilities.
    if request.echo and (logprobs is not None or not isinstance(prompt, str)):
        options.Metadata["mlx.prompt_logprobs"] = "true"
    return options
