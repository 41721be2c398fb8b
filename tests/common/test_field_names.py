"""Names of fields in messages: each reader gets its own, and no other text becomes one."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from common.error_details import packed, unpacked
from common.field_names import (
    fields_in,
    from_template,
    named,
    renamed,
    template_of,
    unmarked,
    written,
)

NAMES = st.text(st.characters(codec="utf-8"), min_size=1, max_size=8)
PLAIN = st.text(st.characters(codec="utf-8", exclude_characters="\x0e\x0f"))
MESSAGES = st.lists(st.one_of(PLAIN, NAMES.map(named))).map("".join)


@given(MESSAGES, st.text(st.characters(codec="utf-8")))
def test_details_bring_any_message_back(message: str, said: str) -> None:
    fields = fields_in(message)
    assert from_template(template_of(message, fields), fields) == message
    if fields:
        assert unpacked(packed(3, said, message, fields)) == (fields, message)


@given(st.binary())
def test_any_details_are_read_or_ignored(raw: bytes) -> None:
    fields, message = unpacked(raw)
    assert set(fields_in(message)) <= set(fields)


@given(MESSAGES)
def test_a_reader_sees_no_marks_and_its_own_names(message: str) -> None:
    shown = written(message)
    assert "\x0e" not in shown
    assert "\x0f" not in shown
    assert fields_in(renamed(message, lambda name: f"my {name}")) == tuple(
        f"my {name}" for name in fields_in(message)
    )
    assert written(renamed(message, lambda _: "x")) == written(message, lambda _: "x")


def test_a_name_of_a_client_ends_where_it_ends() -> None:
    assert fields_in(f"{named('a' + chr(15) + 'b')} is bad") == ("ab",)
    assert written(f"{named('{0}')} is {{0}}") == "{0} is {0}"


@given(st.text(st.characters(codec="utf-8") | st.sampled_from("\x0e\x0f")))
def test_the_words_of_others_contain_no_field(words: str) -> None:
    assert fields_in(unmarked(words)) == ()
    message = f"{named('a')}: {unmarked(words)}"
    assert fields_in(message) == ("a",)
    assert written(message, str.upper) == f"A: {unmarked(words)}"
