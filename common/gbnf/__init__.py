"""GBNF, the grammar notation of llama.cpp: read, and turned into Lark for llguidance."""

from common.gbnf.lark import gbnf_to_lark
from common.gbnf.parser import GbnfError, parse

__all__ = ["GbnfError", "gbnf_to_lark", "parse"]
