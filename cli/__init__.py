"""The command `mlx-backend`: serves models, talks to them, and manages those on this machine."""
