"""The ways in which the engine says no.

Every message is written for the person who reads it at the far end of the wire: what was wrong,
with which value, what to do. None carries a path of the server or a secret.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import ClassVar, Self

from common.wording import shown

CONTEXT_LENGTH = "context_length_exceeded"


class EngineError(Exception):
    """Base of all errors that the engine reports to a caller; `str()` is the client's sentence.

    fields: the fields of the request that the sentence names, the one at fault first.
    code: a word for programs, where the kind of error and its status do not say enough.
    """

    code: ClassVar[str] = ""

    def __init__(self, sentence: str = "", *fields: str) -> None:
        super().__init__(sentence)
        self.fields = fields


class InvalidRequest(EngineError):
    """The request cannot be served as it is, now or later."""


class PromptTooLong(InvalidRequest):
    """The prompt leaves no room for an answer in the context; `str()` names both lengths."""

    code = CONTEXT_LENGTH


class NotLoaded(EngineError):
    """No model is loaded (never, not yet, or not any more)."""

    def __init__(self, why: str = "call LoadModel first") -> None:
        super().__init__(f"model not loaded: {why}")


class Overloaded(EngineError):
    """The queue or the memory budget is full; the same request may succeed later."""


class TooLong(EngineError):
    """A text is longer than the model reads at once; `str()` names both lengths."""

    code = CONTEXT_LENGTH


class WrongKind(EngineError):
    """The loaded model is not made for what it was asked."""


class ModelNotFound(EngineError):
    """The model reference names nothing that exists here or on the hub."""


class ModelRejected(EngineError):
    """The reference leads to something, but not to a model that this backend can load."""

    @classmethod
    def because(cls, name: str, reason: str) -> Self:
        """The refusal of the model of that name. reason: the rest of the sentence."""
        return cls(f"model {shown(name)} cannot be loaded: {reason}")


class ShuttingDown(EngineError):
    """The process is on its way out and takes no new work."""

    def __init__(self, why: str = "the backend is shutting down") -> None:
        super().__init__(why)


class Cancelled(EngineError):
    """The work was cancelled by its owner, by Free, or by the end of the process."""


class EngineFailed(EngineError):
    """The engine met an internal fault while it served this request."""


class NotFinite(EngineFailed):
    """The model computed NaN or infinity where a probability is read."""

    def __init__(self) -> None:
        super().__init__(
            "the model's logits are not finite numbers: its weights are damaged, or it overflows in"
            " its data type (the option dtype:float32 may help)"
        )


class NotQuick(Exception):
    """Work that was to be quick takes noticeable time: it is begun again where it may."""


@contextmanager
def about(field: str) -> Iterator[None]:
    """Blame this field of the request for an error raised inside, unless it names its own."""
    try:
        yield
    except EngineError as error:
        error.fields = error.fields or (field,)
        raise
