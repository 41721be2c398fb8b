"""Two hundred texts of all lengths, among them a small retrieval task.

The first are questions, then come passages: question n is answered by passage n. The rest is other
text that people embed: words, code, other scripts, paragraphs up to the model's length.
"""

from __future__ import annotations

QUESTIONS = (
    "How do plants turn sunlight into food?",
    "Who painted the Mona Lisa?",
    "What is the boiling point of water at sea level?",
    "How can I reset a forgotten password?",
    "Which planet has the largest rings?",
    "Why does bread dough rise?",
    "When did the Berlin Wall come down?",
    "What keeps an aeroplane in the air?",
    "How many strings does a violin have?",
    "What does a compiler do?",
    "Where do emperor penguins breed?",
    "How is cheese made?",
    "What causes the tides?",
    "How do vaccines protect people?",
    "What is the tallest mountain on Earth?",
    "How do I get a refund for a broken product?",
    "What language is spoken in Brazil?",
    "How do bees tell each other where flowers are?",
    "What is inflation in an economy?",
    "How long does it take light to reach us from the Sun?",
)
PASSAGES = (
    (
        "In photosynthesis, chloroplasts use the energy of light to build sugar from carbon dioxide"
        " and water, and give off oxygen."
    ),
    "Leonardo da Vinci worked on the portrait now hanging in the Louvre from about 1503 on.",
    "Water boils at 100 degrees Celsius under the pressure of one atmosphere.",
    (
        "Open the sign-in page, choose the link for lost credentials, and follow the mail we send"
        " you to set a new secret word."
    ),
    "Saturn is known for a broad system of rings made of ice and rock.",
    "Yeast feeds on sugars in flour and gives off carbon dioxide, whose bubbles lift the loaf.",
    "On the evening of 9 November 1989 the border in the divided German capital was opened.",
    "A wing bends the flow of air downwards, and the air pushes the wing upwards in turn: lift.",
    "The instrument is tuned in fifths, G, D, A and E: four strings in all.",
    "It translates source code of a programming language into instructions for a machine.",
    "The birds gather on the sea ice of Antarctica in autumn, where the males keep the eggs warm.",
    "Milk is curdled with rennet, the whey is drained, and the curd is salted, pressed and aged.",
    "The pull of the Moon, and to a lesser degree of the Sun, raises bulges in the oceans.",
    (
        "They show the immune system a harmless part of a germ, so that it makes antibodies before"
        " an infection."
    ),
    "Mount Everest rises 8,849 metres above the level of the sea, on the border of Nepal.",
    (
        "If an item arrives damaged, send it back within thirty days and the price is paid back to"
        " your card."
    ),
    (
        "Portuguese has been the official tongue of South America's largest country since colonial"
        " times."
    ),
    "A worker that has found nectar runs a waggle dance on the comb; its angle is the direction.",
    "When prices in general rise over time, the same money buys fewer goods and services.",
    "Sunshine needs eight minutes and twenty seconds for the 150 million kilometres to the Earth.",
)
_SUBJECTS = (
    "The committee", "An old sailor", "My neighbour's cat", "The new version of the library",
    "A distant galaxy", "The court of appeal", "This recipe", "Her first novel",
)  # fmt: skip
_VERBS = (
    "was surprised by", "has never agreed with", "depends on", "was written about",
    "looks nothing like", "makes a point of",
)  # fmt: skip
_OBJECTS = ("the weather", "several small changes", "a question of taste")
_ODD = (
    "a", "?", "hello", "HELLO", "naïve café", "Zürich", "東京は日本の首都です。", "Привет, мир!",
    "مرحبا بالعالم", "def add(a, b):\n    return a + b", "SELECT * FROM users WHERE id = 7;",
    "https://example.org/path?query=1#part", "{\"key\": [1, 2, 3]}", "🙂🙃", "3.14159",
    "   spaced   ",
)  # fmt: skip

_PLAIN = [f"{who} {does} {what}." for who in _SUBJECTS for does in _VERBS for what in _OBJECTS][
    :125
]


def _paragraph(first: int, sentences: int) -> str:
    return " ".join(_PLAIN[(first + 7 * step) % len(_PLAIN)] for step in range(sentences))


_LONG = [_paragraph(first, 2 + first % 17) for first in range(19)]
TEXTS: tuple[str, ...] = (*QUESTIONS, *PASSAGES, *_ODD, *_PLAIN, *_LONG)
assert len(TEXTS) == 200
