"""Limits the time and memory of chat templates, which are untrusted programs.

Jinja's sandbox protects our objects, but does not prevent endless loops or gigabytes of output.
`limit_templates` makes `transformers` compile templates in an environment that does: every loop
iteration, call, filter and operator checks the time, everything that is created counts towards a
total, and an operation that could create a large value or hold the interpreter for long is checked
before it runs. A template that exceeds a limit raises CostlyTemplate. The same holds while it is
compiled, because Jinja computes constant expressions then.
"""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import wraps
from types import GeneratorType
from typing import Any

from jinja2 import Template, TemplateError, nodes
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

SECONDS = 5.0  # of the thread's own processor time
_LONGEST = 1 << 26  # characters of one value
_ITEM = 32  # number of characters that one item counts as
_TOGETHER = 1 << 30  # bytes of all values that are created
_CONSTANT = 1 << 24  # bytes of all values that are computed while the template is compiled
_LARGEST = 1 << 20  # largest integer argument that is a width or a count
_LARGEST_OF_EACH = 1 << 10  # largest width that a filter applies to each piece of a text
_LONGEST_OF_EACH = 1 << 6  # characters that a filter writes between the pieces of a text
_MOST_BITS = 1 << 12
_MOST_ITEMS = 1 << 18  # items that one filter reads, unless reading them takes next to no time
_MOST_PIECES = 1 << 21  # into which a text may be split
_MOST_SOURCE = 1 << 20  # characters of the template itself
_DEEPEST = 100  # generators that read from one another in a chain
_UNCHECKED = 8  # comparisons in a row that do not check the time
_WIDTH = re.compile(r"\d{5}")  # a format string with such a width could write gigabytes
_SIZED = (str, list, tuple, dict, range)
_GROWS = "its output is too large"
_WIDE = "it formats a value with too large a width"
_NUMBERS = "it computes with numbers that are too large"
# Filters that return lists and objects as they are, not as text.
_KEEPING = frozenset(
    "abs attr batch count d default dictsort first float groupby int items last length list map max"
    " min random reject rejectattr reverse round select selectattr slice sort sum unique"
    " _checked _rounds".split()
)
# Filters that read a long text or list quickly, or item by item.
_QUICK = frozenset(
    "count d default e escape first forceescape last length lower replace safe string tojson trim"
    " upper _checked _joined _rounds".split()
)
_OF_EACH = frozenset("batch expandtabs format indent slice tojson wordwrap".split())
# Methods and filters whose result may be far larger than their input, even without arguments.
_GROWING = _OF_EACH | {"format", "join", "split", "rsplit", "splitlines"}
# Methods that lead to bytes, to codecs written in Python, or from one character to many.
_UNSAFE = frozenset(("encode", "from_bytes", "to_bytes", "translate"))


class CostlyTemplate(TemplateError):
    """The template takes more time or memory than a prompt may."""


class _Budget:
    def __init__(self, most: int) -> None:
        self._from, self._until = time.monotonic() + SECONDS, time.thread_time() + SECONDS
        self._left = most

    def check_time(self) -> None:
        # A thread's own time is never ahead of the clock, which is read up to 100 times as fast.
        if time.monotonic() > self._from and time.thread_time() > self._until:
            raise CostlyTemplate(f"it takes more than {SECONDS:g} seconds")

    def take(self, value: Any) -> None:
        self.check_time()
        if isinstance(value, int) and value.bit_length() > _MOST_BITS:
            raise CostlyTemplate(_NUMBERS)
        size = _size(value)
        self._left -= sys.getsizeof(value) if isinstance(value, str) else size
        if size > _LONGEST or self._left < 0:
            raise CostlyTemplate(_GROWS)


_budget: ContextVar[_Budget] = ContextVar("template budget")


@contextmanager
def _budgeted(most: int = _TOGETHER) -> Iterator[None]:
    before = _budget.set(_Budget(most))
    try:
        yield
    finally:
        _budget.reset(before)


class _Template(Template):
    def render(self, *args: Any, **kwargs: Any) -> str:
        with _budgeted():
            return super().render(*args, **kwargs)


class _Counted(NodeTransformer):
    """Turns what the sandbox cannot intercept into filters: loops, concatenations, slices, long
    literals, and some of the comparisons."""

    def __init__(self) -> None:
        self._comparisons = 0

    def visit_For(self, node: nodes.For) -> nodes.For:
        self.generic_visit(node)
        node.iter = _filter(node.iter, "_rounds")
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Filter:
        self.generic_visit(node)
        return _filter(nodes.List(node.nodes, lineno=node.lineno), "_joined")

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Expr:
        self.generic_visit(node)
        return _filter(node, "_checked") if isinstance(node.arg, nodes.Slice) else node

    def visit_List(self, node: Any) -> nodes.Expr:
        self.generic_visit(node)
        stored = getattr(node, "ctx", "load") != "load"
        return node if stored or len(node.items) <= _ITEM else _filter(node, "_checked")

    def visit_Tuple(self, node: Any) -> nodes.Expr:
        return self.visit_List(node)

    def visit_Dict(self, node: Any) -> nodes.Expr:
        return self.visit_List(node)

    def visit_Compare(self, node: Any) -> nodes.Expr:
        self.generic_visit(node)
        self._comparisons += 1
        return node if self._comparisons % _UNCHECKED else _filter(node, "_checked")

    def visit_Test(self, node: Any) -> nodes.Expr:
        return self.visit_Compare(node)


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
        """Compile a template. Raises CostlyTemplate if it is too long or nested too deeply."""
        try:
            return super().from_string(*args, **kwargs)
        except (RecursionError, SyntaxError, MemoryError):
            # Jinja recurses into the template's nesting, and Python limits that of the compiled
            # code: its parser reports a full stack as a MemoryError.
            raise CostlyTemplate("its blocks or brackets are nested too deeply") from None

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        return attr not in _UNSAFE and super().is_safe_attribute(obj, attr, value)

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        if len(source) > _MOST_SOURCE:
            raise CostlyTemplate(f"it has more than {_MOST_SOURCE} characters")
        template: nodes.Template = _Counted().visit(super()._parse(source, name, filename))
        return template

    def _generate(self, *args: Any, **kwargs: Any) -> str:
        with _budgeted(_CONSTANT):
            return super()._generate(*args, **kwargs)

    @staticmethod
    def concat(parts: Iterable[str]) -> str:
        """The output of a template or a macro."""
        return _joined(parts)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        _require_operable(operator, left, right)
        return _taken(super().call_binop(context, operator, left, right))

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805
        owner, name = getattr(__obj, "__self__", None), getattr(__obj, "__name__", "")
        if args:
            _taken(args)  # `*items` in the template passes a whole list
        if name == "join":
            args = tuple(map(_listed, args))
        _require_small(name, owner, (*args, *kwargs.values()))
        return _taken(super().call(__context, __obj, *args, **kwargs))

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        bounded = super().wrap_str_format(value)
        if bounded is not None and _WIDTH.search(value.__self__):
            raise CostlyTemplate(_WIDE)
        return bounded


def limit_templates() -> None:
    """Make `transformers` render all chat templates within the limits."""
    from transformers.utils import chat_template_utils

    chat_template_utils.ImmutableSandboxedEnvironment = BoundedEnvironment


class _Filters(dict[str, Any]):
    """Filters by name, with limits also on those that are added later."""

    def __init__(self) -> None:
        super().__init__(_rounds=_rounds, _joined=_joined)
        self["_checked"] = _same

    def __setitem__(self, name: str, work: Callable[..., Any]) -> None:
        place = 1 if hasattr(work, "jinja_pass_arg") else 0

        @wraps(work)
        def bounded(*args: Any, **kwargs: Any) -> Any:
            before, (owner, *given) = args[:place], args[place:]
            owner = _listed(owner) if name in ("join", "sum") else owner
            if name not in _KEEPING:
                _written(owner)
            if name not in _QUICK and len(owner if isinstance(owner, _SIZED) else "") > _MOST_ITEMS:
                raise CostlyTemplate(f"it goes through more than {_MOST_ITEMS} items")
            _require_small(name, owner, (*given, *kwargs.values()))
            made = _taken(work(*before, owner, *given, **kwargs))
            return _Waiting(made, owner) if isinstance(made, GeneratorType) else made

        super().__setitem__(name, bounded)


class _Waiting(Iterator[Any]):
    """The items of a generator. Raises CostlyTemplate if it waits for too many others.

    CPython crashes when it frees a long chain of generators.
    """

    def __init__(self, items: Iterator[Any], source: Any) -> None:
        self._items = items
        self.depth: int = getattr(source, "depth", 0) + 1 if isinstance(source, _Waiting) else 1
        if self.depth > _DEEPEST:
            raise CostlyTemplate("its filters are nested too deeply")

    def __next__(self) -> Any:
        return next(self._items)


def _same(value: Any) -> Any:
    return value


def _listed(value: Any) -> Any:
    """A list of the items, if the value has no length."""
    return list(value) if isinstance(value, Iterator) else value


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
    if not given and name not in _GROWING:
        return
    largest = max((abs(value) for value in given if isinstance(value, int)), default=0)
    if largest > _LARGEST:
        raise CostlyTemplate(f"it passes {largest} as a width or count")
    if name in _OF_EACH and largest > _LARGEST_OF_EACH:
        raise CostlyTemplate(_WIDE)
    texts = [value for value in given if isinstance(value, str)]
    size = 0
    if name == "format" and isinstance(owner, str) and _WIDTH.search(owner):
        raise CostlyTemplate(_WIDE)
    if name == "replace" and isinstance(owner, str) and len(texts) == 2:
        size = owner.count(texts[0]) * len(texts[1])
    elif name in _OF_EACH - {"format"}:
        words = [text for one in given for text in (one if isinstance(one, tuple) else (one,))]
        if any(isinstance(text, str) and len(text) > _LONGEST_OF_EACH for text in words):
            raise CostlyTemplate(_WIDE)
    elif name in ("split", "rsplit", "splitlines") and isinstance(owner, str):
        pieces = owner.count(texts[0]) if texts and texts[0] else len(owner) // 2
        size = _LONGEST + 1 if pieces > _MOST_PIECES else 0
    elif name == "sum" and any(isinstance(one, list | tuple) for one in given):
        # Each addition copies the list so far.
        size = _weight(owner) * len(owner) >> 9
    elif name == "join":
        parts, glue = (given[0], owner) if isinstance(owner, str) and given else (owner, texts)
        between = len(glue) if isinstance(glue, str) else sum(map(len, glue))
        size = len(parts) * between if isinstance(parts, _SIZED) else 0
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
            raise CostlyTemplate(_WIDE)
    if operator in ("*", "**") and isinstance(left, int) and isinstance(right, int):
        bits = left.bit_length() * (right if operator == "**" else 1) + right.bit_length()
        if bits > _MOST_BITS:
            raise CostlyTemplate(_NUMBERS)


def _written(value: Any) -> Any:
    """The value if its text is small enough."""
    if type(value) is not str or len(value) > _LONGEST:
        _weight(value)
    return value


def _weight(value: Any) -> int:
    """The length of its text; a list may contain another list many times."""
    waiting, size = [value], 0
    while waiting:
        one = waiting.pop()
        size += _ITEM + _size(one)
        if size > _LONGEST:
            raise CostlyTemplate(_GROWS)
        if isinstance(one, dict):
            waiting += one.values()
        elif isinstance(one, list | tuple):
            waiting += one
    return size


def _size(value: Any) -> int:
    """The length in characters."""
    if isinstance(value, str):
        return len(value)
    return len(value) * _ITEM if isinstance(value, _SIZED) else 0


def _taken(value: Any) -> Any:
    if (budget := _budget.get(None)) is not None:
        budget.take(value)
    return value
