"""Seeded random JSON schemas of all kinds that can be enforced, nested in each other."""

from __future__ import annotations

import random
from typing import Any

Schema = dict[str, Any]
PATTERNS = ["^[a-z]{2,6}$", "^[A-Z]{3}-[0-9]{2,4}$", "^(red|green|blue)$", "^a?b+$", "^\\d{4}$"]
NAMES = ["name", "size", "tags", "at", "ünï", "a b", 'q"uote', "$x", "nested"]
FORMATS = ["date", "time", "uuid", "ipv4"]


def random_schema(choose: random.Random) -> Schema:
    """An object or list, with the definitions that it refers to."""
    definitions = {"small": _scalar(choose), "pair": _object(choose, 2)}
    schema = choose.choice([_object, _object, _list])(choose, 0)
    return {**schema, "$defs": definitions}


def _any(choose: random.Random, depth: int) -> Schema:
    if depth >= 3 or choose.random() < 0.5:
        return _scalar(choose)
    kinds = [_object, _list, _reference, _either]
    return choose.choice(kinds)(choose, depth)


def _scalar(choose: random.Random) -> Schema:
    match choose.randrange(9):
        case 0:
            return {"type": "string", "maxLength": choose.randrange(1, 12)}
        case 1:
            return {"type": "string", "pattern": choose.choice(PATTERNS)}
        case 2:
            low = choose.randrange(-50, 50)
            return {"type": "integer", "minimum": low, "maximum": low + choose.randrange(200)}
        case 3:
            least = round(choose.uniform(-9, 9), 2)
            return {"type": "number", "minimum": least, "exclusiveMaximum": least + 3}
        case 4:
            return {"enum": choose.sample(["a", 'b"c', 1, None, True, 2.5, "ü", [1], {"k": 0}], 3)}
        case 5:
            return {"const": choose.choice(["x", 7, False, None])}
        case 6:
            return {"type": choose.choice(["boolean", "null", "integer"])}
        case 7:
            return {"type": ["string", "null"], "minLength": 2, "maxLength": 5}
    return {"type": "string", "format": choose.choice(FORMATS)}


def _object(choose: random.Random, depth: int) -> Schema:
    names = choose.sample(NAMES, choose.randrange(1, 5))
    properties = {name: _any(choose, depth + 1) for name in names}
    required = [name for name in names if choose.random() < 0.6]
    extra = choose.choice([False, False, False, {"type": "integer"}])
    return {
        "type": "object",
        "properties": properties,
        "required": required,
        "additionalProperties": extra,
    }


def _list(choose: random.Random, depth: int) -> Schema:
    least = choose.randrange(3)
    items = _any(choose, depth + 1)
    return {"type": "array", "items": items, "minItems": least, "maxItems": least + 3}


def _reference(choose: random.Random, _depth: int) -> Schema:
    return {"$ref": f"#/$defs/{choose.choice(['small', 'pair'])}"}


def _either(choose: random.Random, depth: int) -> Schema:
    return {"anyOf": [_any(choose, depth + 1), _scalar(choose)]}
