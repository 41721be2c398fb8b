"""Anthropic's Messages API: its requests as chat requests, and answers in its form."""
