"""Ollama's own API, for programs that support no other: its requests as chat requests."""
