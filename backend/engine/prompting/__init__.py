"""Turns messages into tokens: chat templates, quoted text, infill. No module uses MLX."""
