"""Limits the time and memory of chat templates, which are untrusted programs.

Jinja's sandbox protects our objects, but does not prevent endless loops or gigabytes of output.
`limit_templates` makes `transformers` compile templates in an environment that does: every loop
iteration, call, filter and operator checks the time, and an operation that could create a large
value is checked before it runs. A template that exceeds a limit raises CostlyTemplate.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import wraps
from typing import Any

from jinja2 import Template, TemplateError, nodes
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

SECONDS = 5.0  # of the thread's own processor time
_LONGEST = 1 << 26  # characters or items of one value
_NOTICED = 1 << 16  # smaller values are not counted
_TOGETHER = 1 << 30  # characters and items of all larger values together
_LARGEST = 1 << 20  # largest integer argument that is a width or a count
_MOST_BITS = 1 << 12
_VISIT = 16  # number of characters that visiting one item counts as
_WIDTH = re.compile(r"\d{5}")  # a format string with such a width could write gigabytes
_GROWS = "its output is too large"
# Filters that return lists and objects as they are, not as text.
_KEEPING = frozenset(
    "abs attr batch count d default dictsort first float groupby int items last length list map max"
    " min random reject rejectattr reverse round select selectattr slice sort sum unique".split()
)


class CostlyTemplate(TemplateError):
    """The template takes more time or memory than a prompt may."""


class _Budget:
    def __init__(self) -> None:
        self._until = time.thread_time() + SECONDS
        self._left = _TOGETHER

    def check_time(self) -> None:
        if time.thread_time() > self._until:
            raise CostlyTemplate(f"it takes more than {SECONDS:g} seconds")

    def take(self, size: int) -> None:
        self.check_time()
        if size > _NOTICED:
            self._left -= size
            if size > _LONGEST or self._left < 0:
                raise CostlyTemplate(_GROWS)


_budget: ContextVar[_Budget] = ContextVar("template budget")


@contextmanager
def _budgeted() -> Iterator[None]:
    before = _budget.set(_Budget())
    try:
        yield
    finally:
        _budget.reset(before)


class _Template(Template):
    def render(self, *args: Any, **kwargs: Any) -> str:
        with _budgeted():
            return super().render(*args, **kwargs)


class _Counted(NodeTransformer):
    """Turns loops and concatenations, which the sandbox cannot intercept, into filters."""

    def visit_For(self, node: nodes.For) -> nodes.For:
        self.generic_visit(node)
        node.iter = _filter(node.iter, "_rounds")
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Filter:
        self.generic_visit(node)
        return _filter(nodes.List(node.nodes, lineno=node.lineno), "_joined")


def _filter(node: Any, name: str) -> nodes.Filter:
    return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """Jinja's sandbox with bounds on time and sizes."""

    template_class = _Template
    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, finalize=_written, **kwargs)
        filters, self.filters = self.filters, _Filters()
        for name, work in filters.items():
            self.filters[name] = work
        del self.globals["lipsum"]

    def from_string(self, *args: Any, **kwargs: Any) -> Template:
        """Compile a template. Raises CostlyTemplate if it is nested too deeply."""
        try:
            return super().from_string(*args, **kwargs)
        except (RecursionError, SyntaxError):
            # Jinja recurses into the template's nesting, and Python limits that of the compiled
            # code.
            raise CostlyTemplate("its blocks or brackets are nested too deeply") from None

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        template: nodes.Template = _Counted().visit(super()._parse(source, name, filename))
        return template

    @staticmethod
    def concat(parts: Iterable[str]) -> str:
        """The output of a template or a macro."""
        return _joined(parts)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        _require_operable(operator, left, right)
        return _taken(super().call_binop(context, operator, left, right))

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805
        owner = getattr(__obj, "__self__", None)
        _require_small(getattr(__obj, "__name__", ""), owner, (*args, *kwargs.values()))
        return _taken(super().call(__context, __obj, *args, **kwargs))

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        bounded = super().wrap_str_format(value)
        if bounded is not None and _WIDTH.search(value.__self__):
            raise CostlyTemplate("it formats a value with too large a width")
        return bounded


def limit_templates() -> None:
    """Make `transformers` render all chat templates within the limits."""
    from transformers.utils import chat_template_utils

    chat_template_utils.ImmutableSandboxedEnvironment = BoundedEnvironment


class _Filters(dict[str, Any]):
    """Filters by name, with limits also on those that are added later."""

    def __init__(self) -> None:
        super().__init__(_rounds=_rounds, _joined=_joined)

    def __setitem__(self, name: str, work: Callable[..., Any]) -> None:
        place = 1 if hasattr(work, "jinja_pass_arg") else 0

        @wraps(work)
        def bounded(*args: Any, **kwargs: Any) -> Any:
            if name not in _KEEPING:
                _written(args[place])
            _require_small(name, args[place], (*args[place + 1 :], *kwargs.values()))
            return _taken(work(*args, **kwargs))

        super().__setitem__(name, bounded)


def _rounds(items: Iterable[Any]) -> Iterator[Any]:
    budget = _budget.get(None)
    for item in items:
        if budget is not None:
            budget.check_time()
        yield item


def _joined(parts: Iterable[Any]) -> str:
    texts: list[str] = []
    length = 0
    for part in parts:
        texts.append(str(_written(part)))
        length += len(texts[-1])
        if length > _LONGEST:
            raise CostlyTemplate(_GROWS)
    return str(_taken("".join(texts)))


def _require_small(name: str, owner: Any, given: tuple[Any, ...]) -> None:
    """Raise CostlyTemplate for a call whose result may be far larger than its arguments."""
    largest = max((abs(value) for value in given if isinstance(value, int)), default=0)
    if largest > _LARGEST:
        raise CostlyTemplate(f"it passes {largest} as a width or count")
    if name in ("expandtabs", "indent", "tojson", "format") and largest > _NOTICED >> 6:
        raise CostlyTemplate("it formats a value with too large a width")
    texts = [value for value in given if isinstance(value, str)]
    size = 0
    if name == "format" and isinstance(owner, str) and _WIDTH.search(owner):
        raise CostlyTemplate("it formats a value with too large a width")
    if name == "replace" and isinstance(owner, str) and len(texts) == 2:
        size = owner.count(texts[0]) * len(texts[1])
    elif name == "indent" and texts and isinstance(owner, str):
        size = owner.count("\n") * len(texts[0])
    elif name == "join":
        parts, glue = (given[0], owner) if isinstance(owner, str) and given else (owner, texts)
        size = _size(parts) * sum(map(_size, glue)) if isinstance(glue, list) else 0
        size = _size(parts) * len(glue) if isinstance(glue, str) else size
        _written(parts)
    if size > _LONGEST:
        raise CostlyTemplate(_GROWS)


def _require_operable(operator: str, left: Any, right: Any) -> None:
    if operator == "*":
        for count, value in ((left, right), (right, left)):
            if isinstance(count, int) and count * _size(value) > _LONGEST:
                raise CostlyTemplate(_GROWS)
    if operator == "%" and isinstance(left, str):
        _written(right)
        if _WIDTH.search(left):
            raise CostlyTemplate("it formats a value with too large a width")
    if operator in ("*", "**") and isinstance(left, int) and isinstance(right, int):
        bits = left.bit_length() * (right if operator == "**" else 1) + right.bit_length()
        if bits > _MOST_BITS:
            raise CostlyTemplate("it computes with numbers that are too large")


def _written(value: Any) -> Any:
    """The value if its text is small enough; a list may contain another list many times."""
    waiting, size = [value], 0
    while waiting:
        one = waiting.pop()
        size += _VISIT + _size(one)
        if size > _LONGEST:
            raise CostlyTemplate(_GROWS)
        if isinstance(one, dict):
            waiting += one.values()
        elif isinstance(one, list | tuple):
            waiting += one
    return value


def _size(value: Any) -> int:
    return len(value) if isinstance(value, str | list | tuple | dict) else 0


def _taken(value: Any) -> Any:
    if (budget := _budget.get(None)) is not None:
        budget.take(_size(value))
    return value
