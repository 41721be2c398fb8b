"""The engine: one thread that owns MLX, and everything that runs on it or prepares work for it.

`docs/architecture.md` describes the layers and the path of a request through them.
"""
