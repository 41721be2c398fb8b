"""Compiles the constraints of requests for one loaded model."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any
from weakref import WeakSet

import numpy as np

from backend.engine.constraints.constraint import Compiled, Constraint, cause_in, words
from backend.engine.constraints.matching import TokenizerSource, matcher_of, on_stack
from backend.engine.constraints.reasoning import setting_of
from backend.engine.constraints.spec import ConstraintSpec
from backend.engine.constraints.table import TokenTable, source_of
from backend.engine.constraints.trial import MARGIN, MEMORY_KEPT, MEMORY_TOGETHER, STACK, Trial
from backend.engine.errors import InvalidRequest, Overloaded, about
from backend.engine.recent import Recent
from backend.engine.units import MIB
from common.chat_format import ChatFormat
from common.field_names import unmarked
from common.formats.shapes import to_record
from common.machine_memory import free_memory

MAX_TEXT = 256 * 1024
"""Maximum number of characters of a grammar, or of tools as JSON."""
_TEXTS_KEPT = 4 * MIB
"""Maximum number of characters of the grammars that are remembered after they were read."""
_MOST_KEPT = 64  # grammars
_FREE_SHARE = 4  # grammars may use 1/_FREE_SHARE of the memory that is free

Try = Callable[[str, Mapping[str, Any]], dict[str, Any]]

_LARK_PLACE = re.compile(r"(?:at )?(\d+)\((\d+)\): (.*)")
_REGEX_PLACE = re.compile(r"regex parse error:\n(.*)\n( *)\^.*\nerror: (.*)")


@dataclass(eq=False)
class ConstraintCompiler:
    """Compiles constraints for one tokenizer. Several prompt threads may do so at the same time."""

    tokenizer: Any  # mlx-lm's TokenizerWrapper
    vocabulary_size: int  # width of the model's logits
    end_tokens: Collection[int]  # ids that end an answer
    chat_format: ChatFormat  # the model's format of reasoning and calls

    def __post_init__(self) -> None:
        self._source: TokenizerSource | None = None  # dropped once the child process has it
        self._table: TokenTable | None = None
        self._trial: Trial | None = None
        self._unready = ""  # why the table cannot be built; another try would take a second
        self._ready_lock = threading.Lock()
        self._grammars: Recent[dict[str, Any]] = Recent(_TEXTS_KEPT, _MOST_KEPT)
        self._compiled: Recent[Compiled] = Recent(MEMORY_KEPT, _MOST_KEPT)
        self._in_use: WeakSet[Compiled] = WeakSet()
        self._in_use_lock = threading.Lock()

    def prepare(self) -> None:
        """Build the token table during the load, which takes up to a second for a large vocabulary.

        llguidance holds the interpreter's lock meanwhile. If the first constraint built the table,
        every stream would halt.
        """
        # A fault, which may be a panic in Rust, fails the requests with a constraint, not the load.
        with suppress(BaseException), self._ready_lock:
            self._token_table()

    def close(self) -> None:
        """End the child process, which would otherwise outlive this process for a moment."""
        if self._trial is not None:
            self._trial.end()

    def compile(
        self,
        spec: ConstraintSpec,
        *,
        prompt_tail: str = "",
        answers_messages: bool = False,
        thinking: bool | None = None,
        quick: bool = False,
    ) -> Constraint:
        """Return the constraint of one row, at the beginning of its answer.

        prompt_tail: the end of the prompt's text, which shows whether reasoning is open.
        answers_messages: whether the prompt consists of messages; the answer may contain reasoning.
        thinking: the request's setting; None if it has none.
        quick: whether to stop if compiling takes noticeable time.

        Raises InvalidRequest, with the position in the user's text, for a constraint that is
        invalid, cannot be enforced or costs too much; Overloaded if the constraints of other
        requests leave too little memory; NotQuick if `quick` and the constraint takes longer.
        """
        table, trial = self._table_and_trial()
        attempt = partial(trial.attempt, quick=quick)
        body = self._grammar(spec, table, attempt)
        if spec.optional:
            self._require_marked(body, spec, table, attempt)
        answer = None if spec.answer is None else self._answer(spec.answer, table, attempt)
        setting = ""
        if answers_messages:
            setting = setting_of(
                self.chat_format,
                table.special,
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
        compiled = self._compile(text, spec, table, attempt)
        return Constraint(
            compiled.matcher.deep_copy(),
            table.known,
            table.ends,
            words(table.tokens.vocab_size),
            compiled,
        )

    def _require_marked(
        self, body: Mapping[str, Any], spec: ConstraintSpec, table: TokenTable, attempt: Try
    ) -> None:
        """Refuse optional calls in a format whose calls begin like ordinary text.

        No grammar could distinguish such a call from text.
        """
        matcher = self._compile(_alone(body), spec, table, attempt).matcher
        mask = np.frombuffer(matcher.deep_copy().compute_bitmask(), dtype=np.uint32)
        first = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
        if not set(first.tolist()) <= set(table.special.ids.values()):
            what, other = "strict tools", "mark no tool as strict"
            if spec.answer is not None:
                what, other = (
                    "tools together with a grammar for the answer",
                    "leave one of them out",
                )
            raise InvalidRequest(
                f"{what} cannot be enforced with tool_choice auto, because this model writes calls"
                f" without a token that marks them: send tool_choice required, or {other}",
                "Tools" if spec.answer is None else "Grammar",
            )

    def _answer(self, spec: ConstraintSpec, table: TokenTable, attempt: Try) -> Mapping[str, Any]:
        """Return the grammar of an answer without calls.

        The grammar is first compiled alone, so that an error names it.
        """
        with about("Grammar"):
            body = self._grammar(spec, table, attempt)
            self._compile(_alone(body), spec, table, attempt)
            return body

    def _table_and_trial(self) -> tuple[TokenTable, Trial]:
        """Return the token table and the child process, which this starts at the first call."""
        with self._ready_lock:
            table = self._token_table()
            if self._trial is None:
                assert self._source is not None
                self._trial, self._source = Trial(self._source), None
            return table, self._trial

    def _token_table(self) -> TokenTable:
        backend = getattr(self.tokenizer, "backend_tokenizer", None)
        if backend is None:
            raise InvalidRequest(
                "answers of this model cannot be constrained, because its tokenizer is not"
                " supported: leave out the grammar, the schema, and calls that are required"
            )
        if self._unready:
            raise InvalidRequest(self._unready)
        if self._table is None:
            source = source_of(backend, self.vocabulary_size, self.end_tokens)
            vocabulary = backend.get_vocab(with_added_tokens=True)
            try:
                self._table = TokenTable.of(vocabulary, self.vocabulary_size, source)
            except InvalidRequest as refusal:
                self._unready = str(refusal)
                raise
            self._source = source
        return self._table

    def _grammar(self, spec: ConstraintSpec, table: TokenTable, attempt: Try) -> Mapping[str, Any]:
        """Return the constrained part of the answer, as an llguidance grammar."""
        try:
            sent = json.dumps(spec.tools) if spec.kind == "calls" else spec.text
        except RecursionError:
            raise InvalidRequest(
                f"the {_WHAT[spec.kind]} are nested too deeply: use fewer levels of nesting"
            ) from None
        if len(sent) > MAX_TEXT:
            raise InvalidRequest(
                f"{len(sent)} characters are too many for the {_WHAT[spec.kind]}:"
                f" {MAX_TEXT} are allowed"
            )
        request = {
            "spec": {
                "kind": spec.kind,
                "text": spec.text,
                "tools": spec.tools,
                "parallel": spec.parallel,
            },
            "format": self.chat_format.name,
            "shape": self.chat_format.shape and to_record(self.chat_format.shape),
            "special": table.special.ids if spec.kind == "calls" else {},
        }
        key = f"{spec.kind} {spec.parallel} {sent}"
        if (known := self._grammars.get(key)) is None:
            reply = attempt(f"the {_WHAT[spec.kind]}", request)
            if "refusal" in reply:
                raise InvalidRequest(reply["refusal"])
            known = reply["grammar"]
            self._grammars.put(key, known, len(key))
        return known

    def _compile(
        self, grammars: str, spec: ConstraintSpec, table: TokenTable, attempt: Try
    ) -> Compiled:
        """Return the compiled grammar, new or from the cache.

        grammars: a JSON list of llguidance grammars.
        """
        if (known := self._compiled.get(grammars)) is not None:
            return known
        reply = attempt(f"the {_WHAT[spec.kind]}", {"grammars": grammars})
        error = reply["error"]
        if not error:
            self._require_memory(f"the {_WHAT[spec.kind]}", reply["bytes"])
            made = on_stack(STACK + MARGIN, lambda: matcher_of(table.tokens, grammars))
            error = made.get_error()
        if error:
            raise InvalidRequest(_error_message(spec, error))
        compiled = Compiled(made, reply["bytes"])
        with self._in_use_lock:
            self._in_use.add(compiled)
        self._compiled.put(grammars, compiled, len(grammars) + compiled.bytes)
        return compiled

    def _require_memory(self, subject: str, needed: int) -> None:
        """Raise Overloaded if a grammar does not fit in memory beside those that are in use.

        Grammars that no request uses are dropped first.
        """
        most = min(MEMORY_TOGETHER, free_memory() // _FREE_SHARE)
        if needed + self._memory_in_use() > most:
            self._compiled.clear()
        if (used := self._memory_in_use()) and needed + used > most:
            raise Overloaded(
                f"{subject} takes {needed // MIB} MiB of memory, and the grammars of other requests"
                f" take {used // MIB} of {most // MIB} MiB: send it again later, or make it smaller"
            )

    def _memory_in_use(self) -> int:
        with self._in_use_lock:
            return sum(compiled.bytes for compiled in self._in_use)


def _alone(body: Mapping[str, Any]) -> str:
    return json.dumps({"grammars": [{"name": "body", **body}]})


_WHAT = {
    "gbnf": "grammar",
    "json_schema": "JSON schema",
    "lark": "Lark grammar",
    "regex": "regular expression",
    "calls": "tools' schemas",
}


def _error_message(spec: ConstraintSpec, error: str) -> str:
    """Return the message for an error of llguidance, with the position in the user's text."""
    subject = f"the {_WHAT[spec.kind]} cannot be enforced"
    error = unmarked(error)  # it quotes the client's text
    if regex := _REGEX_PLACE.search(error):
        where = f" at character {len(regex[2]) - 3} of" if spec.kind == "regex" else " in"
        return f"{subject}: {regex[3]}{where} {regex[1].strip()[:80]!r}"
    if (why := cause_in(error)) is not None:
        return f"{subject}, because {why}"
    first = error.strip().splitlines()[0] if error.strip() else "it is too complex"
    lark = _LARK_PLACE.match(first)
    if lark and spec.kind == "lark":
        return f"{subject}: line {lark[1]}, column {lark[2]}: {lark[3]}"
    return f"{subject}: {lark[3] if lark else first}"[:400]
