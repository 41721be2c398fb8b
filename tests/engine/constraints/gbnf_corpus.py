"""GBNF grammars as LocalAI writes them, each with texts that it accepts and rejects."""

from __future__ import annotations

from dataclasses import dataclass

STRING = r"""string ::= "\"" (
        [^"\\\x7F\x00-\x1F] |
        "\\" (["\\bfnrt] | "u" [0-9a-fA-F] [0-9a-fA-F] [0-9a-fA-F] [0-9a-fA-F])
      )* "\"" space
"""
SPACE = 'space ::= " "?\n'
REALVALUE = r"""root-0-arguments ::= "{" space "\"city\"" space ":" space string "}" space
root-0-name ::= "\"weather\"" space
realvalue ::= "{" space "\"arguments\"" space ":" space root-0-arguments
  "," space "\"name\"" space ":" space root-0-name "}" space
"""
ARR = r"""arr  ::=
  "[\n"  (
        realvalue
    (",\n"  realvalue)*
  )? "]"
"""
FREE = r"""freestring ::= (
            [^\x00] |
            "\\" (["\\/bfnrt] | "u" [0-9a-fA-F] [0-9a-fA-F] [0-9a-fA-F] [0-9a-fA-F])
    )* space
"""
MIXED = (
    "mixedstring ::= freestring | freestring arr freestring |"
    " (freestring realvalue freestring)* | realvalue"
)
JSON_OBJECT = r"""root   ::= object
value  ::= object | array | string | number | ("true" | "false" | "null") ws

object ::=
  "{" ws (
            string ":" ws value
    ("," ws string ":" ws value)*
  )? "}" ws

array  ::=
  "[" ws (
            value
    ("," ws value)*
  )? "]" ws

string ::=
  "\"" (
    [^"\\] |
    "\\" (["\\/bfnrt] | "u" [0-9a-fA-F] [0-9a-fA-F] [0-9a-fA-F] [0-9a-fA-F]) # escapes
  )* "\"" ws

number ::= ("-"? ([0-9] | [1-9] [0-9]*)) ("." [0-9]+)? ([eE] [-+]? [0-9]+)? ws

ws ::= ([ \t\n] ws)?
"""
SCHEMA = (
    r"""boolean ::= ("true" | "false") space
integer ::= ("-"? ([0-9] | [1-9] [0-9]*)) space
number ::= ("-"? ([0-9] | [1-9] [0-9]*)) ("." [0-9]+)? ([eE] [-+]? [0-9]+)? space
null ::= "null" space
colour ::= "\"red\"" | "\"blue\""
tags ::= "[" space (string ("," space string)*)? "]" space
root ::= "{" space "\"age\"" space ":" space integer "," space "\"c\"" space ":" space colour
 "," space "\"tags\"" space ":" space tags "}" space
"""
    + SPACE
    + STRING
)
TREE = (
    r"""root ::= "{" space "\"items\"" space ":" space list "}" space
list ::= "[" space (node ("," space node)*)? "]" space
node ::= leaf | branch
leaf ::= "{" space "\"name\"" space ":" space string "}" space
branch ::= "{" space "\"name\"" space ":" space string "," space "\"of\"" space ":" space
 list "}" space
"""
    + SPACE
    + STRING
)
CALL = '{"arguments": {"city":"Rome"}, "name":"weather"}'


@dataclass(frozen=True)
class Shape:
    name: str
    grammar: str
    takes: tuple[str, ...]
    refuses: tuple[str, ...]


SHAPES = [
    Shape(
        "json_object",
        JSON_OBJECT,
        ("{}", '{ "a" : [1, -2.5e+3, "x\\u00e9\\n", {}, [ ],\n\ttrue] } ', '{"k":"\ttab"}'),
        ("[]", '{"a":}', '{"a":1,}', "{'a':1}"),
    ),
    Shape(
        "schema",
        SCHEMA,
        ('{"age":3,"c":"red","tags":[]}', '{ "age": -12, "c": "blue","tags": ["a", "b"] } '),
        ('{"age":3}', '{"age":3,"c":"pink","tags":[]}', '{"age":3,"c":"red","tags":[]}  '),
    ),
    Shape(
        "tree",
        TREE,
        ('{"items": []}', '{"items": [{"name": "a b"}, {"name": "c", "of": [{"name":""}] } ]} '),
        ('{"items": [{"of": []}]}', '{"items": [{"name": "a", "name": "b"}]}'),
    ),
    Shape(
        "one call",
        f"root ::= realvalue\n{REALVALUE}{SPACE}{STRING}",
        (CALL,),
        (f"[{CALL}]", CALL.replace("Rome", '"')),
    ),
    Shape(
        "parallel calls",
        f"{STRING}{SPACE}{ARR}root ::= arr | realvalue\n{REALVALUE}",
        (CALL, f"[\n{CALL}]", f"[\n{CALL},\n{CALL}]", "[\n]"),
        (f"[{CALL}]", f"[\n{CALL},{CALL}]"),
    ),
    Shape(
        "mixed",
        f"root ::= mixedstring\n{MIXED}\n{FREE}{ARR}{REALVALUE}{SPACE}{STRING}",
        ("", "Hello { there", CALL, f"Sure: {CALL} done", f"[\n{CALL}]!", "\U0001f600 \\ \n"),
        ("\x00",),
    ),
    Shape(
        "literal prefix",
        f'root ::= "CALL: " (arr | realvalue)\n{REALVALUE}{ARR}{SPACE}{STRING}',
        (f"CALL: {CALL}", f"CALL: [\n{CALL}]"),
        (CALL, "CALL:"),
    ),
    Shape(
        "a person's own",
        r"""# moves of chess
root ::= "1. " move " " move "\n" ([1-9] [0-9]? ". " move " " move "\n"){1,3}
move ::= (pawn | nonpawn | castle) [+#]?
nonpawn ::= [NBKQR] [a-h]? [1-8]? "x"? [a-h] [1-8]
pawn ::= ([a-h] "x")? [a-h] [1-8] ("=" [NBKQR])?
castle ::= "O-O" "-O"?
""",
        ("1. e4 e5\n2. Nf3 O-O-O+\n", "1. e4 exd5\n2. Nb1c3 a8=Q#\n3. O-O Kf7\n"),
        ("1. e4 e5\n", "1. e9 e5\n2. a1 a2\n"),
    ),
]
