"""Limits the time and memory of chat templates, which come with a checkpoint and may be hostile.

Jinja's sandbox protects this program's objects, but prevents neither endless loops nor gigabytes of
output. `limit_templates` makes `transformers` compile templates in an environment that does: loops
and calls check the time, values that are assigned or returned count towards a total, and operations
that could create a large value are checked before they run.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar
from functools import wraps
from time import monotonic, thread_time
from types import GeneratorType
from typing import Any

from jinja2 import Template, TemplateError, Undefined, nodes
from jinja2.runtime import Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer
from markupsafe import Markup

SECONDS = 5.0  # maximum processor time of the thread
_LONGEST = 1 << 25  # characters of one value; each item of a list counts as _ITEM
_ITEM = 32
_TOGETHER = 1 << 29  # characters of all counted values
_UNCOUNTED = 1 << 12  # characters; values up to this length are not counted
_REPEATED = 1 << 18  # characters of the result of a multiplication
_CONSTANT = 1 << 24  # characters of all values that are computed while a template is compiled
_MOST_BITS = 1 << 12
_MOST_ITEMS = 1 << 17
_MOST_SOURCE = 1 << 20  # characters of the template's source
_AT_ONCE = 64  # iterations between two checks of the time, and additions between two checks
# A format string with such a width, or with a width among its arguments, could write gigabytes.
_WIDTH = re.compile(r"\d{5}|(?:^|[^%])(?:%%)*%[-+ #.\d]*\*")
_GROWS = "it makes values that are too large"
_UNITS = {str: 1, Markup: 1, Undefined: 0} | dict.fromkeys((list, tuple, dict, range), _ITEM)
# Filters and methods whose result may be far larger than their arguments.
_GROWING = frozenset(
    "batch center expandtabs format format_map indent join ljust replace rjust slice split rsplit"
    " splitlines tojson wordwrap zfill".split()
)
# The characters at which the method inserts its arguments; others may do so anywhere.
_AT_ARGUMENT = frozenset(("replace", "split", "rsplit"))  # they do so at their first argument
_PLACES = {"format": "{%", "format_map": "{", "indent": "\n", "expandtabs": "\t"}
# Methods that make many characters of one, or values that are not strings.
_UNSAFE = frozenset(("encode", "from_bytes", "to_bytes", "translate"))
_CHECKED = _GROWING | _UNSAFE


class CostlyTemplate(TemplateError):
    """The template takes more time or memory than a prompt may."""


class _Budget:
    """What a template may still use.

    left: characters of counted values.
    soonest, until: the limits of the clock and of the thread's processor time.
    """

    def __init__(self, most: int) -> None:
        self.left = most
        self.soonest, self.until = monotonic() + SECONDS, thread_time() + SECONDS


_budget: ContextVar[_Budget] = ContextVar("template budget")


class _Template(Template):
    def render(self, *args: Any, **kwargs: Any) -> str:
        _budget.set(_Budget(_TOGETHER))
        return super().render(*args, **kwargs)


class _Namespace(Namespace):
    """A namespace of constant length as a string, because its values change after being counted."""

    def __repr__(self) -> str:
        return "<Namespace>"


class _Guards(NodeTransformer):
    """Adds filters to a template where values grow or time passes outside of calls."""

    additions = 0

    def visit(self, node: Any) -> Any:
        self.generic_visit(node)
        match node:
            case nodes.For():
                node.iter = _filter(node.iter, "_timed")
            case nodes.Assign():
                node.node = _filter(node.node, "_counted")
            case nodes.With():
                node.values = [_filter(value, "_counted") for value in node.values]
            case nodes.Add() | nodes.Concat():
                self.additions += 1
                return node if self.additions % _AT_ONCE else _filter(node, "_counted")
            case nodes.List() | nodes.Tuple() | nodes.Dict() if getattr(node, "ctx", "") != "store":
                # A list of variables may contain another list many times.
                weighs = any(node.find_all((nodes.Name, nodes.Getattr))) or len(node.items) > _ITEM
                return _filter(node, "_counted") if weighs else node
        return node


def _filter(node: Any, name: str) -> Any:
    """Add a filter, which runs only when the template does, to a node that is not a constant."""
    if isinstance(node, nodes.Const):
        return node
    return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """Jinja's sandbox with limits on time and sizes."""

    template_class = _Template
    intercepted_binops = frozenset({"*", "**", "%"})

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.filters, filters = _Filters(), self.filters
        for name, work in filters.items():
            self.filters[name] = work
        self.filters |= {"_timed": _timed, "_counted": _counted}
        self.globals["namespace"] = _Namespace
        del self.globals["lipsum"]

    def from_string(self, *args: Any, **kwargs: Any) -> Template:
        """Compile a template. Raises CostlyTemplate if it is too long or nested too deeply."""
        try:
            return super().from_string(*args, **kwargs)
        except (RecursionError, SyntaxError, MemoryError):
            # Jinja recurses into the template's nesting, and Python limits the nesting of the
            # compiled code: its parser reports a full stack as a MemoryError.
            raise CostlyTemplate("its blocks or brackets are nested too deeply") from None

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        if len(source) > _MOST_SOURCE:
            raise CostlyTemplate(f"it has more than {_MOST_SOURCE} characters")
        template: nodes.Template = _Guards().visit(super()._parse(source, name, filename))
        return template

    def _generate(self, *args: Any, **kwargs: Any) -> str:
        _budget.set(_Budget(_CONSTANT))
        return super()._generate(*args, **kwargs)

    @staticmethod
    def concat(parts: Iterable[str]) -> str:
        """Join the output of a template, a macro or a block."""
        texts = parts if type(parts) is list else list(parts)
        if sum(map(len, texts)) > _LONGEST:
            raise CostlyTemplate(_GROWS)
        text: str = _counted("".join(texts))
        return text

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        whole = isinstance(left, int) and isinstance(right, int)
        if operator == "%":
            grows = isinstance(left, str) and _WIDTH.search(left) is not None
        elif whole:
            times = right if operator == "**" else 1
            grows = left.bit_length() * times + right.bit_length() > _MOST_BITS
        else:
            pairs = ((left, right), (right, left))
            grows = any(isinstance(n, int) and n * _size(value) > _REPEATED for n, value in pairs)
        if grows:
            raise CostlyTemplate(_GROWS)
        return _counted(super().call_binop(context, operator, left, right))

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805
        _check_time()
        if type(__obj) is Macro:
            for value in (*args, *kwargs.values()):
                _counted(value)
        elif (name := getattr(__obj, "__name__", "")) in _CHECKED:
            owner = getattr(getattr(__obj, "__wrapped__", __obj), "__self__", None)
            _require_small(name, owner, (*args, *kwargs.values()))
        return super().call(__context, __obj, *args, **kwargs)


def limit_templates() -> None:
    """Make `transformers` render all chat templates within the limits."""
    from transformers.utils import chat_template_utils

    chat_template_utils.ImmutableSandboxedEnvironment = BoundedEnvironment


class _Filters(dict[str, Any]):
    """A dictionary of filters that limits every filter it receives."""

    def __setitem__(self, name: str, work: Callable[..., Any]) -> None:
        first = 1 if hasattr(work, "jinja_pass_arg") else 0

        @wraps(work)
        def limited(*args: Any, **kwargs: Any) -> Any:
            if name in _GROWING:
                _require_small(name, args[first], (*args[first + 1 :], *kwargs.values()))
            value = work(*args, **kwargs)
            if type(value) is GeneratorType:
                # Not lazily: CPython crashes on a long chain of generators.
                return iter(_counted(list(_timed(value))))
            return _counted(value)

        super().__setitem__(name, limited)


def _require_small(name: str, owner: Any, arguments: tuple[Any, ...]) -> None:
    """Raise CostlyTemplate for a call whose result may be far larger than its arguments."""
    places: Any = arguments[:1] if name in _AT_ARGUMENT else _PLACES.get(name)
    at_once = places and isinstance(places[0], str) and isinstance(owner, str)
    pieces = 1 + sum(map(owner.count, places)) if at_once else _width(owner)
    largest = max([_ITEM if "split" in name else 1, *map(_width, arguments)])
    wide = name.startswith("format") and isinstance(owner, str) and _WIDTH.search(owner)
    if name in _UNSAFE or wide or largest * pieces > _LONGEST:
        raise CostlyTemplate(_GROWS)


def _width(value: Any) -> int:
    """Return a number, or the size of another value; the most for one without a length."""
    if isinstance(value, tuple):
        return max(map(_width, value), default=0)
    if isinstance(value, Iterator):
        return _MOST_ITEMS * _ITEM
    return abs(value) if isinstance(value, int) else _size(value)


def _check_time() -> None:
    budget = _budget.get()
    # A thread's processor time is never ahead of the clock, which takes 1/100 of the time to read.
    if monotonic() > budget.soonest and thread_time() > budget.until:
        raise CostlyTemplate(f"it takes more than {SECONDS:g} seconds")


def _timed(items: Any) -> Any:
    """Return the items of a loop or a filter, and check the time meanwhile."""
    _check_time()
    if not items or (type(items) in _UNITS and len(items) <= _AT_ONCE):
        return items

    def each() -> Iterator[Any]:
        for index, item in enumerate(items):
            if index % _AT_ONCE == 0:
                _check_time()
            yield item

    return each()


def _counted(value: Any) -> Any:
    """Count a value that is assigned, passed or returned, and return the value."""
    waiting, together = [], 0
    if isinstance(value, list | tuple | dict):
        _check_time()
        waiting.append(value)
    while waiting:
        item = waiting.pop()
        together += _ITEM + _size(item)
        if together > _LONGEST:
            raise CostlyTemplate(_GROWS)
        if isinstance(item, list | tuple | dict):
            waiting.extend(item.values() if isinstance(item, dict) else item)
    if (size := _size(value)) > _UNCOUNTED:
        budget = _budget.get()
        budget.left -= size
        if size > _LONGEST or budget.left < 0:
            raise CostlyTemplate(_GROWS)
    return value


def _size(value: Any) -> int:
    """Return the length in characters, where each item counts as `_ITEM`; 0 without a length."""
    unit = _UNITS.get(type(value), 0)
    return unit and unit * len(value)
