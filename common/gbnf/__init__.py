"""GBNF, llama.cpp's grammar notation: parsed, and converted to Lark for llguidance."""

from common.gbnf.lark import gbnf_to_lark
from common.gbnf.parser import GbnfError, parse

__all__ = ["GbnfError", "gbnf_to_lark", "parse"]
