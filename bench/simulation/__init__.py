"""Runs the real planner against a cost model in place of the device: no MLX, no weights."""
