"""The engine: one thread that owns MLX, and everything that runs on it or prepares work for it.

The layers and the way of a request through them are in `docs/architecture.md`.
"""
