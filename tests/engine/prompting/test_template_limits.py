"""A bounded template renders what an unbounded one does, or reports that it is too costly."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from jinja2.exceptions import SecurityError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from backend.engine.prompting import template_limits
from backend.engine.prompting.template_limits import BoundedEnvironment, CostlyTemplate

TINY = Path(__file__).parents[2] / "models" / "tiny_chat_template.jinja"
MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": [{"type": "text", "text": "Hi"}, {"type": "image"}]},
    {"role": "assistant", "content": "a" * 100, "tool_calls": [{"name": "f", "arguments": {}}]},
    {"role": "user", "content": "Go on"},
]
TEMPLATES = [
    TINY.read_text(),
    "{% for m in messages %}{{ loop.index }}/{{ loop.length }}{{ loop.last }}{% endfor %}",
    "{% for m in messages if m.role == 'user' %}{{ loop.revindex }}{{ m.content }}{% endfor %}",
    "{% for m in nothing %}x{% else %}none{% endfor %}",
    "{% for key, value in messages[0].items() %}{{ key ~ '=' ~ value ~ 1 ~ none }}{% endfor %}",
    "{% for m in messages recursive %}{{ m.role }}{{ loop(m.tool_calls or []) }}{% endfor %}",
    "{{ messages[2].content.replace('aa', 'b') | upper | indent(4) | trim }}",
    "{{ messages | map(attribute='role') | join(', ') }}{{ ', '.join(['a', 'b']) }}",
    "{{ '%s is %d' % ('x', 3) }}{{ '{:>5}'.format('a') }}{{ '%05d' | format(3) }}",
    "{{ [1, 2] * 3 }}{{ 'ab' * 3 }}{{ 2 ** 10 }}{{ 7 % 4 }}{{ [1] + [2] }}{{ 1 + 1.5 }}",
    "{% macro m(x) %}<{{ x }}>{% endmacro %}{{ m(messages | length) }}{{ m(x=none) }}",
    "{% set x = namespace(a='') %}{% for m in [1] %}{% set x.a = x.a ~ m %}{% endfor %}{{ x.a }}",
    "{{ range(3) | list }}{{ nothing }}{{ true }}{{ none }}{{ 1.0 }}",
    "{{ messages | selectattr('role', 'equalto', 'user') | list }}{{ {'a': [1]} | string }}",
    "{{ messages[0] | dictsort }}{{ messages | groupby('role') | list }}",
    "{{ 'a-b'.split('-') }}{{ '**%d** 5%% *' % 12345678 }}",
    "{{ nothing | select | list }}{{ none | map('upper') | list }}{{ {} | reject | list }}",
    "{% filter upper %}abc{% endfilter %}{% set x %}block{{ 1 }}{% endset %}{{ x }}",
    "{% set x = range(5) | select %}{{ x | first }}{{ x | join('-') }}{{ x | list }}",
    "{{ messages[1:3] | map(attribute='role') | list }}{{ messages[::-1][0].content }}",
    "{{ [[1], [2]] | sum(start=[]) }}{{ range(4) | batch(2, 'x') | list }}{{ 'ab' is in 'cab' }}",
    "{% for a in ["
    + "1, " * 40
    + "] %}{{ a }}{% endfor %}{{ [range(2) | map('string')] | length }}",
]
_KEEP = (
    "{%% set ns = namespace(x=[]) %%}"
    "{%% for a in range(99999) %%}{%% set ns.x = %s %%}{%% endfor %%}"
)
COSTLY = {
    "loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "calls": "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}"
    "{{ m(40) }}",
    "product": "{{ 'a' * 10 ** 10 }}",
    "literal": "{{ 'a' | center(10000000000) }}",
    "list": "{{ ([1] * 2 ** 20) * 2 ** 20 }}",
    "doubling": "{% set ns = namespace(x='ab') %}{% for a in range(60) %}"
    "{% set ns.x = ns.x ~ ns.x %}"
    "{% endfor %}",
    "sum": "{% set ns = namespace(x='ab') %}{% for a in range(60) %}{% set ns.x = ns.x + ns.x %}"
    "{% endfor %}",
    "nested": "{% set ns = namespace(x=['ab']) %}{% for a in range(60) %}"
    "{% set ns.x = [ns.x, ns.x] %}{% endfor %}{{ ns.x }}",
    "block-doubling": "{% set x = namespace(x='ab') %}{% for a in range(60) %}"
    "{% set x.x %}{{ x.x }}{{ x.x }}{% endset %}{% endfor %}",
    "nested-dicts": "{% set ns = namespace(x='ab') %}{% for a in range(60) %}"
    "{% set ns.x = dict(a=ns.x, b=ns.x) %}{% endfor %}{{ ns.x }}",
    "nested-batches": "{{ " + "[1] | batch(40, " * 8 + "'ab'" + ") | list" * 8 + " }}",
    "nested-defaults": "{{ "
    + "[1, 2] | map(attribute='x', default=" * 30
    + "'ab'"
    + ") | list" * 30
    + " }}",
    "nested-json": "{% set ns = namespace(x=['ab']) %}{% for a in range(60) %}"
    "{% set ns.x = [ns.x, ns.x] %}{% endfor %}{{ ns.x | tojson }}",
    "output": "{% for a in range(99999) %}" + "a" * 100_000 + "{% endfor %}",
    "macro": "{% macro m() %}{% for a in range(99999) %}"
    + "a" * 100_000
    + "{% endfor %}{% endmacro %}"
    "{{ m() | length }}",
    "width": "{{ '%9999999999d' % 1 }}",
    "given-width": "{{ '%*d' % (10 ** 15, 1) }}",
    "given-precision": "{{ '%.*f' % (10 ** 15, 1) }}",
    "format": "{{ '{:9999999999}'.format(1) }}",
    "filter-format": "{{ '%9999999999d' | format(1) }}",
    "replace": "{{ ('a' * 99999).replace('', 'b' * 99999) }}",
    "replace-filter": "{{ ('a' * 99999) | replace('a', 'b' * 99999) }}",
    "join": "{{ (['a' * 99999] * 99999) | join }}",
    "join-method": "{{ ('a' * 99999).join(['b'] * 99999) }}",
    "tabs": "{{ ('\t' * 99999).expandtabs(99999) }}",
    "wrapping": "{{ ('a' * 99999) | wordwrap(1, wrapstring='b' * 99999) }}",
    "number": "{{ 10 ** (10 ** 10) }}",
    "kept": "{% set ns = namespace(x=[]) %}{% for a in range(99999) %}"
    "{% set ns.x = ns.x + ['a' * 60000000] %}{% endfor %}",
    "kept-texts": _KEEP % "[ns.x, 'a' * 60000]",
    "kept-lists": _KEEP % "[ns.x, range(60000) | list]",
    "kept-slices": _KEEP % "[ns.x, messages[0:]]",
    "kept-literals": _KEEP % f"[ns.x, [{'a, ' * 4000}]]",
    "kept-arguments": _KEEP % "[ns.x, cycler(*range(2000))]",
    "kept-batches": _KEEP % "[ns.x, 'ab' | batch(60000, 'x') | list]",
    "generators": _KEEP % "ns.x | batch(1)",
    "selections": _KEEP % "ns.x | select",
    "searches": "{% set x = range(20000) | list %}{{ x | select('in', x) | list | length }}",
    "mapped-searches": "{% set x = range(20000) | list %}"
    "{{ [x] | map('reject', 'in', x) | map('list') | list | length }}",
    "sort": "{{ ('ab' * 9999999) | sort | length }}",
    "title": "{{ ('a ' * 9999999) | title | length }}",
    "words": "{{ ('a ' * 9999999).split() | length }}",
    "separators": "{{ (range(9999) | list) | tojson(separators=('a' * 60000, ':')) }}",
    "bytes": "{{ ('a'.encode() * 10 ** 10) | length }}",
    "translation": "{{ ('a' * 99999).translate({97: 'b' * 99999}) }}",
    "lazy-join": "{{ range(99999) | join('b' * 99999) }}",
    "sum-of-lists": "{{ ([messages] * 9999) | sum(start=[]) | length }}",
    "comparisons": "{% set a = 'a' * 60000000 %}{% set b = a ~ '' %}" + "{{ a == b }}" * 400,
}


@pytest.mark.parametrize("template", TEMPLATES)
def test_cheap_templates_render_as_usual(template: str) -> None:
    given: dict[str, Any] = {"messages": MESSAGES, "add_generation_prompt": True}
    plain = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    bounded = BoundedEnvironment(trim_blocks=True, lstrip_blocks=True)
    assert bounded.from_string(template).render(given) == plain.from_string(template).render(given)


@pytest.mark.parametrize("case", COSTLY)
def test_costly_templates_are_stopped(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_limits, "SECONDS", 0.3)
    template = BoundedEnvironment().from_string(COSTLY[case])
    with pytest.raises((CostlyTemplate, SecurityError)):
        template.render(messages=[1] * 60_000)


def test_namespaces_that_contain_one_another_have_a_short_text() -> None:
    template = (
        "{% set ns = namespace(x='ab') %}{% for a in range(60) %}"
        "{% set ns.x = namespace(a=ns.x, b=ns.x) %}{% endfor %}{{ ns.x }}"
    )
    assert BoundedEnvironment().from_string(template).render() == "<Namespace>"


def test_a_message_of_a_million_characters_is_divided() -> None:
    text = "because\n" * 150_000 + "</think>so"
    template = BoundedEnvironment().from_string("{{ text.split('</think>')[-1] }}")
    assert template.render(text=text) == "so"


@pytest.mark.parametrize("divided", ["split()", "split(None, 1)", "rsplit(maxsplit=1)"])
def test_a_message_is_divided_at_space(divided: str) -> None:
    template = BoundedEnvironment().from_string(f"{{{{ 'a b'.{divided} | join }}}}")
    assert template.render() == "ab"


def test_constants_are_not_computed_beyond_the_limits() -> None:
    compiled = BoundedEnvironment().compile("{{ ''|center(999999) }}" * 100, raw=True)
    assert len(compiled) < 50_000_000


def test_a_very_long_template_is_refused() -> None:
    with pytest.raises(CostlyTemplate, match="1048576 characters"):
        BoundedEnvironment().from_string("x" * 1_100_000)


def test_a_filter_that_is_replaced_later_is_limited_too() -> None:
    """transformers replaces `tojson`."""
    environment = BoundedEnvironment()
    environment.filters["tojson"] = lambda text, indent=0: text + " " * indent
    template = environment.from_string("{{ x | tojson(indent=n) }}")
    assert template.render(x="ab", n=1) == "ab "
    with pytest.raises(CostlyTemplate):
        template.render(x="ab", n=10**9)


@pytest.mark.parametrize(
    ("opening", "middle", "closing", "levels"),
    [
        ("(", "1", ")", 5000),
        ("{% if x %}", "", "{% endif %}", 3000),
        ("{% for a in [1] %}", "", "{% endfor %}", 40),
        ("{% set b %}", "", "{% endset %}", 2000),
        ("{% if x %}", "", "{% elif x %}" * 20_000 + "{% endif %}", 1),
    ],
)
def test_a_template_that_is_nested_too_deeply_is_refused(
    opening: str, middle: str, closing: str, levels: int
) -> None:
    text = opening * levels + middle + closing * levels
    if opening == "(":
        text = "{{ " + text + " }}"
    with pytest.raises(CostlyTemplate, match="nested too deeply"):
        BoundedEnvironment().from_string(text).render()
