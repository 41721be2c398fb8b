"""Ollama's own API, for the programs that speak nothing else: their requests as chat requests."""
