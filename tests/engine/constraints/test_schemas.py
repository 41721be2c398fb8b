"""Whatever a mask allows under a JSON schema is valid JSON that satisfies the schema."""

from __future__ import annotations

import json
import random
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import jsonschema
import mlx.core as mx
import mlx_lm
import numpy as np
import pytest

from backend.engine.constraints.compiler import ConstraintCompiler
from backend.engine.constraints.constraint import masked, words
from backend.engine.constraints.schema import MOST_OPTIONAL, MOST_PATTERNS, enforceable, read_schema
from backend.engine.constraints.spec import ConstraintSpec, spec_of_grammar
from backend.engine.errors import InvalidRequest
from common.chat_format import ChatFormat
from tests.common.grammar_walks import byte_tokenizer
from tests.engine.constraints.schemas import random_schema
from tests.engine.constraints.walks import allowed_ids, byte_walk, compiler_for
from tests.long import TEST_LONG

TINY = Path(__file__).parents[2] / "models" / "tiny_text"
BYTES = byte_tokenizer()
COMPILER = compiler_for(BYTES, ChatFormat.named("plain"))


@pytest.mark.parametrize("part", range(5 if TEST_LONG else 2))
def test_random_walks_are_valid(part: int) -> None:
    for seed in range(100 * part, 100 * part + 100):
        schema = random_schema(random.Random(seed))
        constraint = COMPILER.compile(spec_of_grammar(json.dumps(schema)))
        text = byte_walk(BYTES, seed).text(constraint, patience=120)
        jsonschema.validate(json.loads(text), schema)
        assert "\n" not in text


@pytest.mark.parametrize("seed", range(20))
def test_no_property_is_invented(seed: int) -> None:
    inner = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
    listed = {"type": "array", "items": inner, "maxItems": 2}
    schema = {"type": "object", "properties": {"b": inner, "c": listed}, "required": ["b", "c"]}
    constraint = COMPILER.compile(spec_of_grammar(json.dumps(schema)))
    answer = json.loads(byte_walk(BYTES, seed).text(constraint, patience=120))
    assert answer.keys() == {"b", "c"}
    assert all(part.keys() == {"a"} for part in [answer["b"], *answer["c"]])


def test_an_integer_ends() -> None:
    constraint = COMPILER.compile(spec_of_grammar('{"type": "integer", "minimum": 1}'))
    for _ in range(18):
        assert ord("7") in allowed_ids(constraint, BYTES.size)
        constraint.accept(ord("7"))
    assert allowed_ids(constraint, BYTES.size) == [BYTES.end]


def test_the_tiny_model_at_a_high_temperature() -> None:
    loaded = mlx_lm.load(str(TINY))
    model, tokenizer = loaded[0], loaded[1]
    width = model(mx.array([[1]])).shape[-1]
    ends = [int(token) for token in tokenizer.eos_token_ids]
    compiler = ConstraintCompiler(tokenizer, width, ends, ChatFormat.named("hermes", "qwen3"))
    mask = np.zeros((1, words(width)), np.uint32)
    finished = 0
    for seed in range(3):
        schema = random_schema(random.Random(1000 + seed))
        constraint = compiler.compile(spec_of_grammar(json.dumps(schema)))
        cache = mlx_lm.models.cache.make_prompt_cache(model)
        tokens, delivered = tokenizer.encode("<|im_start|>assistant\n"), 0
        ended = False
        while not (ended := ended or constraint.ended) and len(tokens) < 120:
            logits = model(mx.array([tokens[delivered:]]), cache=cache)[:, -1]
            delivered = len(tokens)
            constraint.fill(mask[0])
            scaled = masked(logits, mx.array(mask)) / 1.2
            key = mx.random.key(seed * 4000 + delivered)
            token = int(np.array(mx.random.categorical(scaled, key=key))[0])
            ended = token in ends
            if not ended:
                constraint.accept(token)
                tokens.append(token)
        if ended:  # the others ran into the limit: at a high temperature, numbers do not end
            answer = tokenizer.decode(tokens).partition("assistant\n")[2]
            jsonschema.validate(json.loads(answer), schema)
            finished += 1
    assert finished


@pytest.mark.parametrize("width", [31, 32, 33, 70])
def test_a_mask_keeps_exactly_its_bits(width: int) -> None:
    choose = random.Random(width)
    kept = [[choose.random() < 0.5 for _ in range(width)] for _ in range(3)]
    packed = np.zeros((3, words(width) * 32), bool)
    packed[:, :width] = kept
    bits = np.packbits(packed, axis=1, bitorder="little").view(np.uint32)
    logits = mx.random.normal((3, width), key=mx.random.key(0)).astype(mx.float16)
    result = masked(logits, mx.array(bits))
    assert result.dtype == mx.float16
    expected = np.where(kept, np.array(logits), -np.inf)
    assert np.array_equal(np.array(result), expected)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ('{"type": "object",\n "properties": {"a": {"not": {}}}}', "'not'.*at #/properties/a/not:"),
        ('{"items": [{}, {"contains": 1}]}', "'contains'.*at #/items/1/contains:"),
        ('{"minlength": 3}', "'minlength'.*at #/minlength.*'minLength'"),
        ('{"type":\n}', "line 2 column 1"),
        ("[1]", "must be a JSON object"),
        ('{"type": "string", "pattern": "(?=a)b"}', r"look-around.*\(\?=a\)b"),
        ('{"type": "string", "format": "nonsense"}', "nonsense"),
        ('{"type": "integer", "minimum": 3, "maximum": 1}', "minimum"),
        ('{"$ref": "#/$defs/gone"}', "gone"),
        ('{"items": ' * 100 + "{}" + "}" * 100, "nested more than 60 deep at #(/items){60}"),
        ('{"items": ' * 300 + "{}" + "}" * 300, "nested more than 60 deep at #(/items){60}"),
        ('{"const": ' + "[" * 100 + "]" * 100 + "}", "nested more than 60 deep at #/const(/0){59}"),
        ("[" * 100_000, "nested more than 60 deep"),
        (
            '{"items": {"maxLength": 1e400}}',
            "'maxLength' is not a finite.*at #/items/maxLength",
        ),
        ('{"const": NaN}', "'const' is not a finite number"),
        ('{"multipleOf": 0}', "'multipleOf' is 0 at #/multipleOf: it must be above 0"),
        ('{"type": "integer", "minimum": 1' + "0" * 20 + "}", "too many digits: use at most 18"),
        ('{"minimum": 1' + "0" * 5000 + "}", "too many digits"),
        ('{"oneOf": [{"type": "string"}, {"enum": ["a"]}]}', "oneOf"),
    ],
)
def test_a_schema_that_cannot_be_enforced_is_named(text: str, sentence: str) -> None:
    with pytest.raises(InvalidRequest, match=sentence):
        COMPILER.compile(ConstraintSpec("json_schema", text))


def _object(keyword: str, count: int, required: int = 0) -> dict[str, Any]:
    names = [f"^a{at}$" for at in range(count)]
    entries: dict[str, Any] = {name: {} for name in names}
    return {"type": "object", keyword: entries, "required": names[:required]}


@pytest.mark.parametrize(
    ("most", "message"),
    [
        (_object("properties", 1200), ""),
        (_object("properties", 5000, 3800), ""),
        (_object("patternProperties", 100), ""),
        (_object("properties", 1201), "has 1201 optional properties, but at most 1200 can"),
        (_object("properties", 5001, 5001), "has 5001 properties, but at most 5000 can"),
        (
            {"items": {"anyOf": [_object("properties", 6000)]}},
            "has 6000 properties at #/items/anyOf/0, but at most 5000",
        ),
        (
            {"prefixItems": [_object("properties", 2501, 2501)] * 2},
            "has 5002 properties, but at most 5000",
        ),
        (_object("patternProperties", 101), "has 101 patternProperties, but at most 100"),
    ],
)
def test_a_schema_of_many_properties_is_refused_before_it_is_compiled(
    most: dict[str, Any], message: str
) -> None:
    """llguidance needs seconds to minutes to refuse such a schema, without a word for users."""
    with pytest.raises(InvalidRequest, match=message) if message else nullcontext():
        enforceable(most)


@pytest.mark.parametrize("keyword", ["properties", "patternProperties"])
def test_a_schema_at_the_limit_compiles(keyword: str) -> None:
    count = {"properties": MOST_OPTIONAL, "patternProperties": MOST_PATTERNS}[keyword]
    constraint = COMPILER.compile(
        ConstraintSpec("json_schema", json.dumps(_object(keyword, count)))
    )
    assert byte_walk(BYTES, 1).text(constraint, patience=120).startswith("{")


def test_a_value_of_a_schema_is_not_mistaken_for_a_field() -> None:
    with pytest.raises(InvalidRequest) as caught:
        COMPILER.compile(ConstraintSpec("json_schema", '{"type": "\\u000eTokens\\u000f"}'))
    assert caught.value.fields == ()
    assert caught.value.message.endswith("Invalid type: Tokens")


def test_keywords_that_require_nothing_are_accepted() -> None:
    schema = {"type": "array", "items": {"const": 1}, "uniqueItems": False, "title": "x", "x-y": 1}
    constraint = COMPILER.compile(ConstraintSpec("json_schema", json.dumps(schema)))
    assert json.loads(byte_walk(BYTES, 1).text(constraint)) in ([1] * n for n in range(3000))


def test_keywords_that_are_null_are_absent() -> None:
    unset = '"required": null, "enum": null, "not": null, "$defs": null, "title": null'
    schema = f'{{"type": "object", "properties": {{"a": {{"type": null, {unset}}}}}, {unset}}}'
    assert read_schema(schema) == read_schema('{"type": "object", "properties": {"a": {}}}')
    kept = '{"properties": {"const": {"const": null, "default": null}}}'
    assert read_schema(kept)["properties"]["const"]["const"] is None


def test_which_texts_are_schemas() -> None:
    assert spec_of_grammar(' {"type": "object"}').kind == "json_schema"
    assert spec_of_grammar('root ::= "{"').kind == "gbnf"
    assert spec_of_grammar("{", "lark").kind == "lark"
    assert spec_of_grammar("[1]").kind == "gbnf"
    with pytest.raises(ValueError, match="not a kind of grammar"):
        spec_of_grammar("", "calls")
