"""Anthropic's messages: their request as a chat request, and an answer in their form."""
