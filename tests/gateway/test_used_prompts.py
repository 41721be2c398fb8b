"""Which beginnings of prompts are stored, and how the file is read."""

from __future__ import annotations

from pathlib import Path

import pytest

from gateway.used_prompts import MOST_PROMPTS, UsedPrompts, beginning
from wire import backend_pb2 as pb


def chat(system: str, question: str = "Hi", tools: str = "", choice: str = "") -> pb.PredictOptions:
    messages = [
        pb.Message(role="system", content=system),
        pb.Message(role="user", content=question),
    ]
    return pb.PredictOptions(
        UseTokenizerTemplate=True, Messages=messages, Tools=tools, ToolChoice=choice, Seed=7
    )


def systems(used: UsedPrompts, model: str = "m") -> list[str]:
    return [prompt.Messages[0].content[:1] for prompt in used.of(model)]


def test_the_beginning_has_nothing_of_the_question() -> None:
    request = chat("s" * 2000, "secret", "[]")
    request.Metadata.update({"enable_thinking": "true", "mlx.min_tokens": "3"})
    found = beginning(request)
    assert found is not None
    assert b"secret" not in found.SerializeToString()
    assert dict(found.Metadata) == {"enable_thinking": "true", "mlx.prompt_only": "true"}
    assert (found.Seed, found.Tools, found.Tokens) == (0, "[]", 1)


@pytest.mark.parametrize(
    "request_",
    [
        chat("short"),
        chat("s" * (2 << 20)),
        chat("", tools="t" * 2000, choice="none"),
        pb.PredictOptions(Prompt="p" * 2000),
    ],
)
def test_other_prompts_are_not_counted(request_: pb.PredictOptions) -> None:
    assert beginning(request_) is None


def test_the_most_used_are_stored_and_those_used_once_are_not(tmp_path: Path) -> None:
    used = UsedPrompts(tmp_path)
    for letter, times in zip("abcdefg", (1, 2, 3, 4, 5, 6, 1), strict=True):
        for question in range(times):
            used.note("m", chat(letter * 2000, str(question)))
    assert systems(used) == ["f", "e", "d", "c"]
    used.save()
    later = UsedPrompts(tmp_path)
    assert sorted(systems(later)) == ["c", "d", "e", "f"]
    for _ in range(2):
        later.note("m", chat("x" * 2000))
    assert systems(later)[0] == "x"
    assert len(systems(later)) == MOST_PROMPTS
    other = UsedPrompts(tmp_path)
    for _ in range(2):
        other.note("n", chat("n" * 2000))
    other.save()
    assert sorted(systems(UsedPrompts(tmp_path))) == ["c", "d", "e", "f"]
    assert systems(UsedPrompts(tmp_path), "n") == ["n"]


def test_a_stored_one_that_is_used_once_stays(tmp_path: Path) -> None:
    used = UsedPrompts(tmp_path)
    for _ in range(2):
        used.note("m", chat("a" * 2000))
    used.save()
    later = UsedPrompts(tmp_path)
    later.note("m", chat("a" * 2000))
    assert systems(later) == ["a"]


@pytest.mark.parametrize("content", ["", "[]", '{"m": 5}', '{"m": [5, {"Nothing": 1}]}', "\xff"])
def test_a_file_that_cannot_be_read_does_no_harm(tmp_path: Path, content: str) -> None:
    (tmp_path / "gateway").mkdir()
    (tmp_path / "gateway" / "used-prompts.json").write_text(content, "latin-1")
    used = UsedPrompts(tmp_path)
    assert used.of("m") == []
    for _ in range(2):
        used.note("m", chat("a" * 2000))
    used.save()
    assert systems(UsedPrompts(tmp_path)) == ["a"]


def test_a_cache_folder_that_cannot_be_written_does_no_harm(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    used = UsedPrompts(tmp_path / "file")
    used.note("m", chat("a" * 2000))
    used.save()
