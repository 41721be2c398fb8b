"""Prepares a Score request: the tokens whose log-probabilities are requested.

The prompt and each candidate are tokenised as one text, because the tokens where they meet may
differ from those of the two texts alone. A candidate's tokens begin at the first token that differs
from the prompt's, as in llama.cpp and vLLM. All candidates start from their longest common prefix.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from backend.engine.errors import InvalidRequest, PromptTooLong
from common.field_names import named
from common.prefixes import common_prefix

MOST_CANDIDATES = 1024
MOST_TOKENS = 1 << 16  # of all candidates together
MOST_CHARACTERS = 1 << 24  # in all candidates, each counted with the prompt


@dataclass(frozen=True, slots=True)
class ScoreRequest:
    """A Score request: candidate texts to score after a prompt. `require_bounded` checks it.

    stable_bytes: how many bytes of the prompt (UTF-8) later requests will share; 0 means unknown.
    """

    request_id: str
    prompt: str
    candidates: tuple[str, ...]
    stable_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Continuation:
    """The tokens of one candidate after the shared prefix, scored from `scored_from` on."""

    tokens: tuple[int, ...] = ()
    scored_from: int = 0


@dataclass(frozen=True, slots=True)
class ScorePlan:
    """The tokens of a Score request, after the prefix that all continuations share.

    stable: how many tokens of the prefix later requests will share.
    """

    prefix: list[int]
    continuations: tuple[Continuation, ...]
    stable: int = 0

    @property
    def longest(self) -> int:
        """Tokens of the longest continuation."""
        return max((len(continuation.tokens) for continuation in self.continuations), default=0)


def require_bounded(request: ScoreRequest) -> None:
    """Raise InvalidRequest for texts too long to tokenise, and for contradictory fields."""
    count = len(request.candidates)
    if not count:
        raise InvalidRequest(f"{named('candidates')} is empty: send at least one text to score")
    if count > MOST_CANDIDATES:
        raise InvalidRequest(
            f"{named('candidates')} has {count} entries: send at most {MOST_CANDIDATES}"
        )
    characters = count * len(request.prompt) + sum(map(len, request.candidates))
    if characters > MOST_CHARACTERS:
        raise InvalidRequest(
            f"{named('prompt')} and candidates are {characters} characters, the {named('prompt')}"
            f" counted with each candidate: send at most {MOST_CHARACTERS}, or fewer candidates at"
            " a time",
        )
    size = len(request.prompt.encode())
    if not 0 <= request.stable_bytes <= size:
        raise InvalidRequest(
            f"{named('stable_prefix_len')} is {request.stable_bytes}, but prompt has {size} bytes:"
            " send how many of them stay the same, or 0",
        )


def plan(
    request: ScoreRequest,
    encode: Callable[[str], list[int]],
    context_size: int,
    still_needed: Callable[[], bool],
) -> ScorePlan:
    """Return the tokens to run. Raises InvalidRequest.

    encode: tokenises text like a raw prompt, with a BOS token and without an end token.
    context_size: maximum number of tokens of the prompt and one candidate.
    still_needed: called between two texts; False means that the request was cancelled, and ends the
        work.
    """
    prompt = encode(request.prompt)
    texts = list(_encoded(request, prompt, encode, context_size, still_needed))
    shared = [common_prefix(prompt, tokens) for tokens in texts]
    scored = [place for place, tokens in enumerate(texts) if len(tokens) > shared[place]]
    start = min((shared[place] for place in scored), default=len(prompt))
    if scored and not start:
        first = next(place for place in scored if not shared[place])
        raise InvalidRequest(
            f"nothing comes before the first token of candidates[{first}], so it has no"
            " probability: send a prompt"
        )
    continuations = [Continuation()] * len(texts)
    for place in scored:
        continuations[place] = Continuation(tuple(texts[place][start:]), shared[place] - start)
    total = sum(len(continuation.tokens) for continuation in continuations)
    if total > MOST_TOKENS:
        raise InvalidRequest(
            f"{named('candidates')} have {total} tokens together: send at most {MOST_TOKENS} at a"
            " time",
        )
    prefix = prompt[:start]
    return ScorePlan(prefix, tuple(continuations), _stable(request, prefix, encode))


def _encoded(
    request: ScoreRequest,
    prompt: list[int],
    encode: Callable[[str], list[int]],
    context_size: int,
    still_needed: Callable[[], bool],
) -> Iterator[list[int]]:
    for place, candidate in enumerate(request.candidates):
        if not still_needed():
            return
        tokens = encode(request.prompt + candidate) if candidate else prompt
        if len(tokens) > context_size:
            note = f"with candidates[{place}]"
            raise PromptTooLong(len(tokens), context_size, context_size, note, "prompt")
        yield tokens


def _stable(request: ScoreRequest, prefix: list[int], encode: Callable[[str], list[int]]) -> int:
    if not request.stable_bytes:
        return 0
    text = request.prompt.encode()[: request.stable_bytes].decode(errors="ignore")
    return common_prefix(prefix, encode(text))
