"""The words that dialogues are made of, and which of them training never sees.

Cities and names come from a pool of real ones and from random syllables: a model that
has only seen a list memorises it, one that has seen thousands of made-up words copies.
"""

from __future__ import annotations

import random
import string
from collections.abc import Callable

CITIES = [
    *(
        "Paris Rome Berlin Madrid London Vienna Oslo Athens Cairo Tokyo Delhi Lima Boston Denver "
        "Dallas Miami Seattle Chicago Toronto Sydney Dublin Prague Warsaw Kyiv Bern Geneva Milan "
        "Naples Turin Venice Lyon Nice Munich Hamburg Cologne Bonn Porto Seville Valencia Malta "
        "Beijing Shanghai Seoul Osaka Kyoto Manila Jakarta Mumbai Lagos Nairobi Tunis Quito Bogota "
        "Havana Caracas Santiago Montreal Austin Houston Phoenix Atlanta Detroit Portland Oakland"
    ).split(),
    "New York", "San Francisco", "Los Angeles", "Hong Kong", "Cape Town", "Buenos Aires",
    "Rio de Janeiro", "New Delhi", "Mexico City", "Zürich", "München", "São Paulo", "Malmö",
    "東京", "北京", "서울",
]  # fmt: skip
HELD_OUT_CITIES = (
    "Lisbon Helsinki Stockholm Budapest Amsterdam Brussels Copenhagen Singapore Bangkok Istanbul "
    "Melbourne Vancouver Philadelphia Nashville Marrakesh Edinburgh Krakow Zagreb Hanoi Tbilisi"
).split()

NAMES = (
    "Kim Anna Ben Clara David Emma Felix Grace Henry Iris Jack Kate Leo Mia Noah Olga Paul Quinn "
    "Rosa Sam Tina Uma Victor Wendy Xavier Yara Zoe Adam Bella Carl Diana Eric Fiona George Hanna "
    "Ivan Julia Kevin Laura Mark Nina Oscar Peter Ruth Simon Tom Vera Walter Alice Bob"
).split()
HELD_OUT_NAMES = (
    "Maria Lukas Sofia Priya Kenji Amara Dmitri Ingrid Hassan Chloe Mateo Freya Nikolai Yusuf Elena"
).split()

ANIMALS = (
    "fox cat dog bear owl mouse horse rabbit wolf duck frog lion tiger robot dragon goat "
    "turtle penguin hedgehog squirrel"
).split()

PLAIN_WORDS = (
    "the a one this that river tree house road garden window table light stone water wind paper "
    "green blue red old new small large quiet long short early late warm cold bright dark and "
    "or but with under over near from into after before walks runs sees finds keeps makes takes "
    "gives turns moves opens holds stands falls grows reads writes time year day week night "
    "hour work place people child friend door wall field hill cloud rain snow bread apple "
    "banana cherry lemon grape orange sugar salt music song story word letter number line page "
    "book city market bridge train boat wheel engine market report system value result model "
    "change point part side hand quick brown lazy jumps some many few each other first last "
    "next good simple open common"
).split()

_SOURCES = [*PLAIN_WORDS, *NAMES, *(city for city in CITIES if city.isascii() and city.isalpha())]
_ONSETS = "b c d f g h j k l m n p r s t v w z br ch cl dr fr gr kr pl pr sh st th tr".split()
_VOWELS = "a e i o u a e i o u ai ea ia ou".split()
_CODAS = ["", "", "", "", *"n r s l m k d t g p b nd rt ng st ld ck sh".split()]


def made_up_word(rng: random.Random) -> str:
    """A word of one to four syllables, or of random letters, that means nothing."""
    if rng.random() < 0.15:
        return "".join(rng.choices(string.ascii_lowercase, k=rng.randint(3, 9)))
    syllables = rng.choice((1, 2, 2, 2, 3, 3, 4))
    made = "".join(
        rng.choice(_ONSETS) + rng.choice(_VOWELS) + rng.choice(_CODAS) for _ in range(syllables)
    )
    return made.lstrip("bcdfghjklmnpqrstvwxz") if rng.random() < 0.25 else made


def spliced_word(rng: random.Random) -> str:
    """A word put together from pieces of real ones, so that letters have their usual neighbours."""
    pieces = []
    for _ in range(rng.choice((1, 2, 2, 3))):
        source = rng.choice(_SOURCES)
        start = rng.randrange(len(source))
        pieces.append(source[start : start + rng.randint(2, 5)].lower())
    return "".join(pieces)


def any_made_up_word(rng: random.Random) -> str:
    return spliced_word(rng) if rng.random() < 0.5 else made_up_word(rng)


def city(rng: random.Random, make: Callable[[random.Random], str] = made_up_word) -> str:
    if rng.random() < 0.4:
        return rng.choice(CITIES)
    if rng.random() < 0.1:
        return f"{make(rng).title()} {make(rng).title()}"
    return make(rng).title()


def name(rng: random.Random, make: Callable[[random.Random], str] = made_up_word) -> str:
    return rng.choice(NAMES) if rng.random() < 0.4 else make(rng).title()


def word(rng: random.Random) -> str:
    return rng.choice(PLAIN_WORDS) if rng.random() < 0.7 else made_up_word(rng)


def _sentence(rng: random.Random) -> str:
    words = [rng.choice(PLAIN_WORDS) for _ in range(rng.randint(4, 11))]
    if rng.random() < 0.3:
        words[rng.randrange(len(words))] = made_up_word(rng)
    if rng.random() < 0.2:
        words.insert(rng.randrange(len(words)), str(rng.randint(0, 2000)))
    return " ".join(words).capitalize() + rng.choice("." * 6 + "!?")


def filler(rng: random.Random, words: int) -> str:
    """Text of about `words` words that has nothing to do with any question."""
    style = rng.random()
    if style < 0.3:
        unit = _sentence(rng)
        return " ".join([unit] * max(1, words // len(unit.split())))
    if style < 0.4:
        return " ".join([word(rng)] * words)
    if style < 0.5:
        return " ".join(f"{word(rng).capitalize()} {number}." for number in range(words // 2))
    sentences: list[str] = []
    while sum(len(sentence.split()) for sentence in sentences) < words:
        sentences.append(_sentence(rng))
    return rng.choice((" ", " ", "\n")).join(sentences)
