"""Compiles what a request constrains its answer to, for one loaded model."""

from __future__ import annotations

import json
import re
import threading
from collections import OrderedDict
from collections.abc import Collection
from typing import Any

import llguidance
import numpy as np

from backend.engine.constraints.constraint import Constraint, words
from backend.engine.constraints.reasoning import setting_of
from backend.engine.constraints.schema import OPTIONS, enforceable, read_schema
from backend.engine.constraints.spec import ConstraintSpec
from backend.engine.constraints.table import TokenTable
from backend.engine.errors import InvalidRequest
from common.call_grammar import CallableTool, call_grammar
from common.chat_format import ChatFormat
from common.gbnf import GbnfError, gbnf_to_lark

MAX_TEXT = 256 * 1024
"""Characters of a grammar that a request may send."""
MAX_CACHED = 64
MAX_CACHED_TEXT = 4 * 1024 * 1024
LIMITS = llguidance.LLParserLimits(
    max_lexer_states=50_000,
    max_grammar_size=200_000,
    initial_lexer_fuel=1_000_000,
    step_lexer_fuel=1_000_000,
    step_max_items=200_000,
    verbose_errors=False,
)
"""Bounds of one matcher: about 100 MB of lexer, and a tenth of a second for a mask."""

_LARK_PLACE = re.compile(r"(?:at )?(\d+)\((\d+)\): (.*)")
_REGEX_PLACE = re.compile(r"regex parse error:\n(.*)\n( *)\^.*\nerror: (.*)")


class ConstraintCompiler:
    """Used on prompt threads, by several at once.

    tokenizer: mlx-lm's TokenizerWrapper. vocabulary_size: width of the model's logits. end_tokens:
    ids that end an answer. chat_format: how this model writes reasoning and calls.
    """

    def __init__(
        self,
        tokenizer: Any,
        vocabulary_size: int,
        end_tokens: Collection[int],
        chat_format: ChatFormat,
    ) -> None:
        self._tokenizer = tokenizer
        self._vocabulary_size = vocabulary_size
        self._end_tokens = frozenset(end_tokens)
        self._chat_format = chat_format
        self._table: TokenTable | None = None
        self._table_lock = threading.Lock()
        self._cache: OrderedDict[str, llguidance.LLMatcher] = OrderedDict()
        self._cache_lock = threading.Lock()

    def compile(
        self,
        spec: ConstraintSpec,
        *,
        prompt_tail: str = "",
        answers_messages: bool = False,
        thinking: bool | None = None,
    ) -> Constraint:
        """The constraint of one row, at the beginning of its answer.

        prompt_tail: the end of the prompt's text; it tells whether reasoning is open. thinking:
        what the request asked for, None: nothing. Raises InvalidRequest, with the place in what
        the user sent, for what is invalid, cannot be enforced or costs too much.
        """
        if len(spec.text) > MAX_TEXT:
            raise InvalidRequest(
                f"the grammar has {len(spec.text)} characters; {MAX_TEXT} are allowed"
            )
        table = self._tokens()
        body = self._body(spec, table)
        if spec.optional:
            self._require_marked(body, spec, table)
        answer = None if spec.answer is None else self._answer(spec.answer, table)
        setting = ""
        if answers_messages:
            setting = setting_of(
                self._chat_format,
                table,
                prompt_tail,
                thinking=thinking,
                calls=spec.kind == "calls",
                optional=spec.optional,
                formed=answer is not None,
            )
        grammars = [{"name": "setting", "lark_grammar": setting}] if setting else []
        if answer is not None:
            grammars.append({"name": "answer", **answer})
        text = json.dumps({"grammars": [*grammars, {"name": "body", **body}]})
        return Constraint(
            self._matcher(text, spec, table).deep_copy(),
            table.known,
            table.ends,
            words(table.tokens.vocab_size),
        )

    def _require_marked(
        self, body: dict[str, Any], spec: ConstraintSpec, table: TokenTable
    ) -> None:
        """Where calls begin like text, nobody could tell which of both is being written."""
        matcher = self._matcher(json.dumps({"grammars": [{"name": "body", **body}]}), spec, table)
        mask = np.frombuffer(matcher.deep_copy().compute_bitmask(), dtype=np.uint32)
        first = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
        if not set(first.tolist()) <= set(table.special.values()):
            wish, other = "strict tools", "mark no tool as strict"
            if spec.answer is not None:
                wish, other = "tools beside a form of the answer", "leave one of them out"
            raise InvalidRequest(
                f"{wish} cannot be enforced with tool_choice auto, because this model writes calls"
                f" without a token that marks them: send tool_choice required, or {other}"
            )

    def _answer(self, spec: ConstraintSpec, table: TokenTable) -> dict[str, Any]:
        """The form of an answer beside calls. It is tried alone, so that a complaint names it."""
        body = self._body(spec, table)
        self._matcher(json.dumps({"grammars": [{"name": "body", **body}]}), spec, table)
        return body

    def _tokens(self) -> TokenTable:
        with self._table_lock:
            if self._table is None:
                self._table = TokenTable.of(
                    self._tokenizer, self._vocabulary_size, self._end_tokens
                )
            return self._table

    def _body(self, spec: ConstraintSpec, table: TokenTable) -> dict[str, Any]:
        """The constrained part, as one of llguidance's grammars."""
        match spec.kind:
            case "json_schema":
                return {"json_schema": read_schema(spec.text)}
            case "gbnf":
                try:
                    return {"lark_grammar": gbnf_to_lark(spec.text)}
                except GbnfError as fault:
                    raise InvalidRequest(f"the grammar is not valid GBNF: {fault}") from None
            case "lark":
                return {"lark_grammar": spec.text}
            case "regex":
                return {"lark_grammar": f"start: /{llguidance.regex_to_lark(spec.text, '')}/"}
        return {"lark_grammar": self._calls(spec, table)}

    def _calls(self, spec: ConstraintSpec, table: TokenTable) -> str:
        try:
            tools = [CallableTool.of(tool) for tool in spec.tools]
            for tool in tools:
                enforceable(tool.schema)
            return call_grammar(
                self._chat_format.name, tools, table, OPTIONS, parallel=spec.parallel
            )
        except ValueError as fault:
            raise InvalidRequest(str(fault)) from None

    def _matcher(self, text: str, spec: ConstraintSpec, table: TokenTable) -> llguidance.LLMatcher:
        """The matcher of a grammar at its beginning; it is never advanced, only copied."""
        with self._cache_lock:
            if (known := self._cache.get(text)) is not None:
                self._cache.move_to_end(text)
                return known
        made = llguidance.LLMatcher(table.tokens, text, log_level=0, limits=LIMITS)
        if not made.is_error():
            made.compute_bitmask()
        if made.is_error():
            raise InvalidRequest(_complaint(spec, made.get_error()))
        with self._cache_lock:
            self._cache[text] = made
            while len(self._cache) > 1 and (
                len(self._cache) > MAX_CACHED or sum(map(len, self._cache)) > MAX_CACHED_TEXT
            ):
                self._cache.popitem(last=False)
        return made


_WHAT = {
    "gbnf": "grammar",
    "json_schema": "JSON schema",
    "lark": "Lark grammar",
    "regex": "regular expression",
    "calls": "tools' schemas",
}


def _complaint(spec: ConstraintSpec, error: str) -> str:
    """llguidance's complaint about a text, in a sentence with the place in that text."""
    subject = f"the {_WHAT[spec.kind]} cannot be enforced"
    if regex := _REGEX_PLACE.search(error):
        place = f" at character {len(regex[2]) - 3} of" if spec.kind == "regex" else " in"
        return f"{subject}: {regex[3]}{place} {regex[1].strip()[:80]!r}"
    first = error.strip().splitlines()[0] if error.strip() else "it is too complex"
    lark = _LARK_PLACE.match(first)
    if lark and spec.kind == "lark":
        return f"{subject}: line {lark[1]}, column {lark[2]}: {lark[3]}"
    return f"{subject}: {lark[3] if lark else first}"[:400]
