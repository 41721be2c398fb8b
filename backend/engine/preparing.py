"""Prepares requests on the prompt threads: text to tokens, media, grammars, files.

Nothing here uses MLX. Each kind of request has one method, whose work ends by sending a command to
the engine thread. Each kind of work has its own threads, so that a short prompt never waits behind
a slow image, grammar or file. A stage of the work ends by yielding the name of the threads for the
next stage. A request that is cancelled meanwhile stops after its current stage.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Literal, get_args

from backend.engine.commands import Cancel, Encode, Submit
from backend.engine.embedding.encoding import Encoded, Piece
from backend.engine.errors import (
    TOO_DEEP,
    EngineError,
    EngineFailed,
    InvalidRequest,
    NotQuick,
    about,
    refused_by_system,
)
from backend.engine.events import Finished, Progress, TokenLogprob, Usage
from backend.engine.executing import score_plan
from backend.engine.executing.score_plan import ScoreRequest
from backend.engine.generation import Generation
from backend.engine.outbox import Publication
from backend.engine.prompting.quoted_text import tokenizing
from backend.engine.request import (
    ChatPrompt,
    GenerationRequest,
    InfillPrompt,
    Prompt,
    RawPrompt,
    TokenPrompt,
)
from backend.engine.speech.transcript import Speech
from backend.engine.threads import reserved_threads
from backend.engine.worker import Worker
from common.field_names import named

if TYPE_CHECKING:
    from backend.engine.constraints.constraint import AnswerRule, Constraint
    from backend.engine.served_model import ServedModel

Stage = Literal["text", "long", "media", "video", "grammar", "slow_grammar", "disk"]

_MOST_LOGPROBS = 1 << 18  # about 25 MB of JSON; a gRPC message may have 50 MiB
_LONG = 1 << 15  # characters; rendering and tokenising longer texts takes a noticeable time

# A generator that yields the name of the threads on which its next stage must run.
Work = Callable[["ServedModel", int], Iterator[Stage]]


class Preparer:
    """The prompt threads, and the work that runs on them.

    owners: the handle of each ticket, which the engine changes on the event loop.
    publish: delivers events of a ticket, from any thread.
    """

    def __init__(
        self,
        worker: Worker,
        owners: Mapping[int, Generation],
        publish: Callable[[list[Publication]], None],
    ) -> None:
        self._worker = worker
        self._owners = owners
        self._publish = publish
        self._threads = {
            stage: reserved_threads(1 if stage == "disk" else 2, f"prompt-{stage}")
            for stage in get_args(Stage)
        }

    def start(self, work: Work, served: ServedModel, ticket: int) -> None:
        """Queue the work for a ticket. If it fails, the error is published."""
        self._worker.announce(ticket)
        self._run_next(work(served, ticket), "text", ticket)

    def stop(self) -> None:
        """Start no more work. Running stages end by themselves."""
        for threads in self._threads.values():
            threads.shutdown(wait=False, cancel_futures=True)

    def generation(
        self, request: GenerationRequest, served: ServedModel, ticket: int
    ) -> Iterator[Stage]:
        """Prepare a prompt and its grammar, and search the disk cache."""
        if request.attachments is not None:
            yield "video" if request.attachments.videos else "media"
        elif _characters(request.prompt) > _LONG:
            yield "long"
        with about(request.prompt.field_name):
            prompt = served.prompts.build(
                request.prompt, request.attachments, counted=request.count_only
            )
        if request.count_only:
            self._publish([(ticket, Finished("length", Usage(len(prompt.tokens))))])
            return
        bare = replace(request, attachments=None)
        if bare.prompt_logprobs is not None:
            _require_causal(served, "Metadata mlx.prompt_logprobs is true")
            _require_returnable(len(prompt.tokens), bare.prompt_logprobs)
        from backend.engine.planning.prefix_index import (
            PrefixKey,  # imports NumPy, which takes time
        )

        key = PrefixKey(prompt.tokens if prompt.media is None else prompt.media.key)
        adapter = served.adapters[bare.adapter] if bare.adapter else 0
        if adapter:
            key = key.computed_by(adapter)
        rule: AnswerRule | None = None
        if bare.constraint is not None:
            yield "grammar"
            try:
                rule = _constraint(served, bare, prompt.tail, quick=True)
            except NotQuick:
                yield "slow_grammar"
                rule = _constraint(served, bare, prompt.tail, quick=False)
        rule = _within_budget(served, bare, prompt.tail, rule)
        stored = None
        storable = prompt.media is None and not bare.adapter and bare.prompt_logprobs is None
        if storable and served.disk is not None and served.disk.has_files(bare.disk.path):
            yield "disk"
            in_memory, free = self._worker.known(key)
            stored = served.disk.find(
                prompt.tokens, path=bare.disk.path, in_memory=in_memory, free=free
            )
        if (generation := self._owners.get(ticket)) is None:
            return
        generation.prompt_tail = prompt.tail
        if bare.stream_progress:
            self._publish([(ticket, Progress(Usage(len(prompt.tokens))))])
        remaining = served.context_size - len(prompt.tokens)
        limit = min(bare.max_tokens or served.default_max_tokens or remaining, remaining)
        self._worker.send(
            Submit(
                served.epoch,
                ticket,
                bare,
                prompt.tokens,
                limit,
                rule,
                stored,
                media=prompt.media,
                key=key,
                positions=prompt.positions,
                adapter=adapter,
            )
        )

    def score(self, request: ScoreRequest, served: ServedModel, ticket: int) -> Iterator[Stage]:
        """Tokenise the candidates of a Score, and find their common prefix."""
        _require_causal(served, "Score asks for log-probabilities")
        yield "long"
        with about("prompt"):
            scored = score_plan.plan(
                request,
                served.prompts.encode_open,
                served.context_size,
                still_needed=lambda: ticket in self._owners,
            )
        if ticket not in self._owners:
            return
        if not scored.longest:
            nothing: tuple[tuple[TokenLogprob, ...], ...] = ((),) * len(request.candidates)
            self._publish([(ticket, Finished("stop", Usage(), scores=nothing))])
            return
        row = GenerationRequest(request.request_id, TokenPrompt(tuple(scored.prefix)))
        self._worker.send(
            Submit(served.epoch, ticket, row, scored.prefix, scored.longest, plan=scored)
        )

    def encoding(
        self, read: Callable[[], list[Piece]], characters: int, served: ServedModel, ticket: int
    ) -> Iterator[Stage]:
        """Tokenise the rows that `read` returns; there may be none.

        characters: the length of all their texts.
        """
        if characters > _LONG:
            yield "long"
        with tokenizing():
            pieces = read()
        if pieces:
            self._worker.send(Encode(served.epoch, ticket, pieces))
        else:
            self._publish([(ticket, Encoded(()))])

    def recording(self, text: str, served: ServedModel, ticket: int) -> Iterator[Stage]:
        """Decode a recording; the result of the request is its samples."""
        yield "media"
        from backend.engine.media.decoding import decode_recording

        samples = decode_recording(text, served.media_limits)
        self._publish([(ticket, Encoded((samples,)))])

    def speech(self, speech: Speech, served: ServedModel, ticket: int) -> Iterator[Stage]:
        """Queue a recording for a speech-to-text model."""
        self._worker.send(Encode(served.epoch, ticket, speech))
        yield from ()

    def _run_next(self, work: Iterator[Stage], stage: Stage, ticket: int) -> None:
        """Run the next stage of the work on its threads."""
        with suppress(RuntimeError):  # the threads are shut down: the process is stopping
            self._threads[stage].submit(self._guarded, work, ticket)

    def _guarded(self, work: Iterator[Stage], ticket: int) -> None:
        try:
            following = next(work, None) if ticket in self._owners else None
        except EngineError as refusal:
            self._publish([(ticket, refusal)])
        except RecursionError:  # templates and JSON encoding recurse as deep as the request
            self._publish([(ticket, InvalidRequest(TOO_DEEP))])
        except BaseException as fault:  # a Rust panic in the tokenizer is not an Exception
            failed = EngineFailed(f"the prompt could not be prepared ({type(fault).__name__})")
            self._publish([(ticket, refused_by_system(fault) or failed)])
        else:
            if following is not None:
                self._run_next(work, following, ticket)
            elif ticket not in self._owners:
                # Cancelled meanwhile: the Cancel may have reached the engine before the Submit.
                self._worker.send(Cancel(ticket))
        finally:
            self._worker.withdraw(ticket)  # the next stage takes longer than announced


def _constraint(
    served: ServedModel, request: GenerationRequest, tail: str, *, quick: bool
) -> Constraint:
    """Compile the request's constraint. Raises what `ConstraintCompiler.compile` raises."""
    assert served.constraints is not None, "only text models get requests with a constraint"
    assert request.constraint is not None
    arguments = getattr(request.prompt, "template_arguments", {})
    with about("Tools" if request.constraint.kind == "calls" else "Grammar"):
        return served.constraints.compile(
            request.constraint,
            prompt_tail=tail,
            answers_messages=isinstance(request.prompt, ChatPrompt),
            thinking=arguments.get("enable_thinking"),
            quick=quick,
        )


def _within_budget(
    served: ServedModel, request: GenerationRequest, tail: str, rule: AnswerRule | None
) -> AnswerRule | None:
    """Return the rule, combined with the request's thinking budget if it has one."""
    prompt, most = request.prompt, request.thinking_budget
    if most is None or not isinstance(prompt, ChatPrompt):
        return rule
    chat_format = served.format_of(tools=bool(prompt.tools))
    if not chat_format.thinks:
        return rule
    from backend.engine.constraints.thinking_budget import ThinkingBudget, openings

    encode = served.prompts.tokenize
    return ThinkingBudget(
        most,
        lambda: served.parser(prompt, tail),
        lambda: served.new_text(prompt.continues),
        encode,
        openings(chat_format, encode, served.prompts.control.ids.values()),
        rule,
    )


def _require_causal(served: ServedModel, asked: str) -> None:
    if served.reads_whole:
        raise InvalidRequest(
            f"{asked}, but each token of this model's prompt attends to later tokens, so none has a"
            " probability: load another model, or leave it out"
        )


def _characters(prompt: Prompt) -> int:
    """Return the approximate length of a prompt's text in characters, including tools."""
    match prompt:
        case RawPrompt(text):
            return len(text)
        case TokenPrompt():
            return 0
        case InfillPrompt(prefix, suffix, files):
            return len(prefix) + len(suffix) + sum(len(text) for _, text in files)
        case ChatPrompt(messages, tools, arguments):
            return _size((messages, tools, arguments))


def _size(node: object) -> int:
    """Return the number of characters in all strings of a JSON value."""
    size, inner = 0, [node]
    while inner:
        match inner.pop():
            case str() as text:
                size += len(text)
            case Mapping() as mapping:
                inner += (*mapping, *mapping.values())
            case list() | tuple() as entries:
                inner += entries
            case _:
                size += 1
    return size


def _require_returnable(tokens: int, alternatives: int) -> None:
    """Raise InvalidRequest if a prompt's log-probabilities would be too large for a response."""
    entries = tokens * (1 + alternatives)
    if entries > _MOST_LOGPROBS:
        raise InvalidRequest(
            f"{tokens} prompt tokens with {alternatives} alternatives each are {entries}"
            f" log-probabilities, but at most {_MOST_LOGPROBS} are returned: shorten the prompt, or"
            f" send a smaller {named('TopLogprobs')}",
        )
