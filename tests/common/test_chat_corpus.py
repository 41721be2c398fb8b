"""Every case of the corpus gives the expected message, in every split."""

from __future__ import annotations

import pytest

from common.chat_format import ChatFormat
from tests.common.chat_replay import parse_every_split, plain
from tests.common.corpus import TOOLS, Case, qwen

FAMILIES: dict[tuple[str, str | None, str], list[Case]] = {
    ("hermes", "qwen3", qwen.HEADER): qwen.JSON_CASES,
    ("qwen3_coder", "qwen3", qwen.HEADER): qwen.XML_CASES,
}
CASES = [
    pytest.param(names, case, id=f"{names[0]}: {case.why}")
    for names, cases in FAMILIES.items()
    for case in cases
]


@pytest.mark.parametrize(("names", "case"), CASES)
def test_case(names: tuple[str, str | None, str], case: Case) -> None:
    message = parse_every_split(
        ChatFormat.named(names[0], names[1]),
        case.text,
        tools=TOOLS if case.tools is None else case.tools,
        tail=names[2] if case.tail is None else case.tail,
        reason="length" if case.cut else "stop",
        count=25,
    )
    assert plain(message) == (case.content, case.reasoning, case.calls)
