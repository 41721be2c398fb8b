"""Grammars under which a model can write nothing but calls, in its own way of writing them."""

from common.call_grammar.build import call_grammar, writes_hermes_calls
from common.call_grammar.tools import CallableTool

__all__ = ["CallableTool", "call_grammar", "writes_hermes_calls"]
