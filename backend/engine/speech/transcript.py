"""What is transcribed, and what comes of it: plain data, without NumPy or MLX."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    import numpy as np


@dataclass(frozen=True, slots=True)
class Speech:
    """A recording to transcribe: float32 samples of one channel, at AUDIO_RATE per second.

    language: a code such as `en`; '' lets the model detect it.
    prompt: earlier text, or words that the recording is likely to contain.
    temperature: 0 is greedy; Whisper then tries higher ones where its text repeats itself or is
        improbable.
    translate: into English.
    words: whether segments list their words.
    """

    samples: np.ndarray
    language: str = ""
    prompt: str = ""
    temperature: float = 0.0
    translate: bool = False
    words: bool = False


@dataclass(frozen=True, slots=True)
class Word:
    """A word of a segment, with its times in seconds from the beginning of the recording."""

    start: float
    end: float
    text: str


@dataclass(frozen=True, slots=True)
class Segment:
    """A part of a transcript; its times are in seconds.

    text: as it is joined with that of other segments, so it may begin with a space.
    """

    start: float
    end: float
    text: str
    tokens: tuple[int, ...] = ()
    words: tuple[Word, ...] = ()


@dataclass(frozen=True, slots=True)
class Transcribed:
    """The segments of the next window of a recording; there may be none.

    language: '' if unknown.
    samples: how many of the recording's have been transcribed so far.
    """

    segments: tuple[Segment, ...]
    language: str = ""
    samples: int = 0
    text: ClassVar[str] = ""


@dataclass(frozen=True, slots=True)
class SpeechAbilities:
    """What a speech-to-text model reads of a `Speech`, besides its samples and its language.

    languages: the codes that it accepts, by themselves and by the names of languages; empty if it
        always detects the language itself.
    samples: whether its temperature can be set.
    """

    languages: Mapping[str, str] = field(default_factory=dict)
    translates: bool = False
    samples: bool = False
    times_words: bool = False
