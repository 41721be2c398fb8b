"""The errors that the engine reports.

Every message is written for the client: what was wrong, with which value, and what to do. No
message contains a path of the server or a secret.
"""

import errno
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, ClassVar, Self

from common.field_names import fields_in, written
from common.wording import shown

CONTEXT_LENGTH = "context_length_exceeded"
SHUTTING_DOWN = "shutting_down"
REFUSED = (
    "the system gives this backend no more threads, processes, files or memory: try again later, or"
    " raise its limits (`ulimit -a`, or those of its container)"
)
TOO_DEEP = (
    "the request is nested too deeply to be read: send messages, tools and template arguments with"
    " less nesting of objects and lists"
)
FILES_TOO_SMALL = (
    "the limit on the size of files is too small for this backend: raise it (`ulimit -f unlimited`)"
)
_REFUSALS = (errno.EAGAIN, errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOSPC)


class EngineError(Exception):
    """Base of all errors that the engine reports; `str()` returns the message for the client.

    message: the message, which may mark the names of fields (common/field_names).
    fields: the fields at fault, if the message does not name them first.
    code: a word for programs, if the class of the error and its status do not say enough.
    """

    code: ClassVar[str] = ""

    def __init__(self, message: str = "", *fields: str) -> None:
        super().__init__(message, *fields)
        self.message = message
        self.fields = tuple(dict.fromkeys((*fields, *fields_in(message))))

    def __str__(self) -> str:
        return written(self.message)


class InvalidRequest(EngineError):
    """The request cannot be served as it is, now or later."""


class PromptTooLong(InvalidRequest):
    """The prompt does not fit in the context.

    Agents compact a conversation only after an error with words that they know, so the message
    contains the words of Anthropic and of OpenAI (tests/gateway/test_full_context.py).

    most: maximum number of tokens of a prompt.
    context: maximum number of tokens of prompt and answer together.
    note: a note about `tokens` in the message.
    """

    code = CONTEXT_LENGTH

    def __init__(self, tokens: int, most: int, context: int, note: str = "", *fields: str) -> None:
        super().__init__(
            f"prompt is too long: {tokens} tokens > {most} maximum{note and f' ({note})'}. This"
            f" model's maximum context length is {context} tokens, prompt and answer together:"
            " shorten the prompt, or load the model with a larger context_size",
            *fields,
        )


class NotLoaded(EngineError):
    """No model is loaded (never, not yet, or not any more)."""

    def __init__(self, why: str = "call LoadModel first") -> None:
        super().__init__(f"model not loaded: {why}")


class Overloaded(EngineError):
    """The queue or the memory budget is full; the same request may succeed later."""


class TooLong(EngineError):
    """A text is longer than the model's limit; `str()` names both lengths."""

    code = CONTEXT_LENGTH


class WrongKind(EngineError):
    """The loaded model does not support this kind of request.

    The message marks the name of the RPC like that of a field, because hosts have other names.
    """


class ModelNotFound(EngineError):
    """The model reference names nothing that exists locally or on the hub."""


class ModelRejected(EngineError):
    """The reference exists but is not a model that this backend can load."""

    @classmethod
    def because(cls, name: str, reason: str) -> Self:
        """Return the error for the model of this name; `reason` is the rest of the message."""
        return cls(f"model {shown(name)} cannot be loaded: {reason}")


class Unusable(ModelRejected):
    """The files of a model or an adapter cannot be used.

    The message is a clause about the files, until `naming` or `beginning` completes it, once.
    """

    begun = False


class Incomplete(Unusable):
    """Files are missing or truncated; another download may fix that."""


class ShuttingDown(EngineError):
    """The process is stopping and accepts no new work."""

    code = SHUTTING_DOWN

    def __init__(self, why: str = "the backend is shutting down") -> None:
        super().__init__(why)


class RankLost(ShuttingDown):
    """A rank that has a part of the model has ended, so nothing can be computed any more."""

    code = ""  # not SHUTTING_DOWN, after which hosts repeat requests: one may have caused the loss


class Cancelled(EngineError):
    """The work was cancelled by its owner, by Free, or by the end of the process."""


class EngineFailed(EngineError):
    """An internal fault of the engine while it served this request."""


class ExpertsUnreadable(EngineFailed):
    """Experts that stay in the checkpoint's files cannot be read any more."""


class NotFinite(EngineFailed):
    """The model computed NaN or infinity instead of a probability."""

    def __init__(self) -> None:
        super().__init__(
            "the model's logits are not finite numbers: its weights are damaged, or it overflows in"
            " its data type (the option dtype:float32 may help)"
        )


class NotQuick(Exception):
    """Work was stopped because it is not quick; it starts again on the threads for slow work."""


def refused_by_system(fault: BaseException) -> Overloaded | None:
    """Return the error if the system has refused a thread, process, file or memory, or None."""
    if isinstance(fault, OSError) and fault.errno == errno.EFBIG:
        return Overloaded(FILES_TOO_SMALL)
    no_thread = isinstance(fault, RuntimeError) and str(fault).startswith("can't start new thread")
    refused = isinstance(fault, OSError) and fault.errno in _REFUSALS
    return Overloaded(REFUSED) if no_thread or refused or isinstance(fault, MemoryError) else None


def is_allocation_failure(fault: BaseException) -> bool:
    """Return whether MLX or Python could not get memory; MLX has no exception class for that.

    The engine's own errors may quote a client's words, and are not searched.
    """
    text = "" if isinstance(fault, EngineError) else str(fault).lower()
    return isinstance(fault, MemoryError) or any(
        sign in text for sign in ("allocat", "out of memory", "bad_alloc", "insufficient memory")
    )


@contextmanager
def about(field: str) -> Iterator[None]:
    """Name this field in an EngineError that is raised inside, unless the error names one."""
    try:
        yield
    except EngineError as error:
        error.fields = error.fields or (field,)
        raise


@contextmanager
def beginning(words: str) -> Iterator[None]:
    """Begin the message of an Unusable that is raised inside with these words and a colon."""
    try:
        yield
    except Unusable as error:
        if not error.begun:
            error.message, error.begun = f"{words}: {error.message}", True
        raise


def naming(model: str) -> AbstractContextManager[None]:
    """Name the model in the message of an Unusable that is raised inside."""
    return beginning(f"model {shown(model)} cannot be loaded")


class Converting(AbstractContextManager[None]):
    """Converts exceptions of some kinds in the context with `convert`, and raises the results.

    A function with `contextmanager` would keep the exception's frames, and so the weights that
    these have loaded, in memory for as long as the new exception.
    """

    def __init__(self, convert: Callable[[Any], Exception], *kinds: type[BaseException]) -> None:
        self._convert, self._kinds = convert, kinds

    def __exit__(self, _: object, fault: BaseException | None, frames: object) -> None:
        del frames
        if isinstance(fault, self._kinds):
            converted = self._convert(fault)
            fault.__traceback__ = fault.__context__ = fault.__cause__ = None
            raise converted from None
