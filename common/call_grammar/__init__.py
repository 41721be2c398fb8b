"""Grammars that allow only tool calls, in the model's own syntax."""

from common.call_grammar.calls import call_grammar, writes_hermes_calls
from common.call_grammar.tools import CallableTool

__all__ = ["CallableTool", "call_grammar", "writes_hermes_calls"]
