"""Grammar for the reasoning before a constrained answer, and for the text around it."""

from __future__ import annotations

from collections.abc import Sequence

from common.call_grammar.rules import SpecialTokens, symbol, text_without
from common.chat_format import ChatFormat
from common.chat_parser import parse_chat
from common.formats.reading import Tags

_HARMONY = "<|channel|>"
_START, _MESSAGE = "<|start|>", "<|message|>"


def setting_of(
    chat_format: ChatFormat,
    special: SpecialTokens,
    prompt_tail: str,
    *,
    thinking: bool | None,
    calls: bool,
    optional: bool = False,
    formed: bool = False,
) -> str:
    """Return a Lark grammar whose `start` includes `@body`, or '' if the answer is only the body.

    prompt_tail: the end of the prompt's text, which shows whether reasoning is open.
    thinking: the request's setting; None means the model's own default.
    calls: whether the body is a call, so that the reasoning must not contain a call.
    optional: whether text may come before the calls, or instead of them.
    formed: if `optional`, whether only `@answer` may replace the calls, and no text may precede
        them.
    """
    tags = chat_format.grammar.tags
    if chat_format.grammar.openers[:1] == ("<|channel|>commentary to=functions.",):
        return _harmony(
            special, prompt_tail, thinking=thinking, calls=calls, optional=optional, formed=formed
        )
    opened = _open_tags(chat_format, prompt_tail)
    avoid = [o for o in chat_format.grammar.openers if len(o) > 1] if calls else []
    before: list[str] = []
    lines: list[str] = []
    if opened and thinking is False:
        before.append(special.lark(opened.closing) + " NEWLINES?")
    elif opened:
        lines += _reasoning("opened", "", opened, special, avoid)
        before.append("opened")
    elif tags and thinking is not False and not _closed(tags, prompt_tail):
        usable = [t for t in tags if t is tags[0] or special.has(t.opening)]
        for index, each in enumerate(usable):
            lines += _reasoning(
                f"reasoning{index}", special.lark(each.opening), each, special, avoid
            )
        names = " | ".join(f"reasoning{index}" for index in range(len(usable)))
        before.append(f"({names})?")
    body = "@body"
    if formed:
        body = "(@answer | @body)"
    elif optional:
        plain = [text for text in avoid if isinstance(special.pieces(text)[0], str)]
        lines.append(f"FREE: {text_without(plain)} & /(?s:.+)/")
        body = "FREE? (@body)?"
    if "<|open|>response<|sep|>" in chat_format.grammar.silent:
        body = _in_response(special, prompt_tail, calls=calls, optional=optional, formed=formed)
    if not before and body == "@body":
        return ""
    return "\n".join([f"start: {' '.join([*before, body])}", *lines, "NEWLINES: /\\n{1,2}/", ""])


def _open_tags(chat_format: ChatFormat, prompt_tail: str) -> Tags | None:
    """Return the tags of the reasoning that the prompt leaves open, or None.

    The chat parser decides.
    """
    if not parse_chat("x", chat_format, prompt_tail=prompt_tail).reasoning_content:
        return None
    tags = chat_format.grammar.tags
    return max(tags, key=lambda each: prompt_tail.rfind(each.opening))


def _closed(tags: Sequence[Tags], prompt_tail: str) -> bool:
    """Return whether the prompt ends with closed reasoning."""
    return prompt_tail.rstrip().endswith(tuple(each.closing for each in tags))


def _reasoning(
    name: str, opening: str, tags: Tags, special: SpecialTokens, avoid: Sequence[str]
) -> list[str]:
    """Return the rules for free text that ends with the closing tag and contains no call opener."""
    first, *rest = special.pieces(tags.closing)
    upper = name.upper()
    if isinstance(first, int):
        plain = [text for text in avoid if isinstance(special.pieces(text)[0], str)]
        return [
            f"{name}: {opening} {upper}? {special.lark(tags.closing)} NEWLINES?",
            f"{upper}: {text_without(plain)} & /(?s:.+)/",
        ]
    return [
        f"{name}: {opening} {upper} {' '.join(map(symbol, rest))} NEWLINES?",
        f"{upper}: {text_without([*avoid, first])} {special.lark(first)}",
    ]


def _in_response(
    special: SpecialTokens, prompt_tail: str, *, calls: bool, optional: bool, formed: bool
) -> str:
    """Return the body in the block in which Kimi K3 writes answers; calls leave the block empty."""
    opening, closing = (
        special.lark("<|open|>response<|sep|>"),
        special.lark("<|close|>response<|sep|>"),
    )
    if prompt_tail.endswith("<|open|>response<|sep|>"):
        opening = ""
    if formed:
        return f"({opening} @answer {closing} | @body)"
    if optional:
        return f"({opening} FREE? {closing})? (@body)?"
    return f"({opening} {closing})? @body" if calls else f"{opening} @body {closing}"


def _harmony(
    special: SpecialTokens,
    prompt_tail: str,
    *,
    thinking: bool | None,
    calls: bool,
    optional: bool,
    formed: bool,
) -> str:
    """Return the grammar of gpt-oss: an analysis message, then a final message or a call."""
    turn = prompt_tail.rpartition(_START)[2]
    final = "" if calls else special.lark("<|channel|>final<|message|>")
    body = "@body"
    if optional:
        answer = "@answer" if formed else "TEXT?"
        body = f"({special.lark('<|channel|>final<|message|>')} {answer} | @body)"
    analysis = special.lark("<|channel|>analysis<|message|>")
    after = special.lark("<|end|><|start|>assistant")
    text = f"TEXT: {text_without([])} & /(?s:.+)/"
    if _MESSAGE in turn and f"{_HARMONY}analysis" in turn:
        thought = after if thinking is False else f"TEXT? {after}"
        return f"start: {thought} {final} {body}\n{text}\n"
    if _MESSAGE in turn:
        return f"start: {after} {body}\n{text}\n" if calls else ""
    thought = "" if thinking is False else f"({analysis} TEXT? {after})?"
    return f"start: {thought} {final} {body}\n{text}\n"
