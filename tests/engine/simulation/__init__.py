"""Runs the real planner with a cost model instead of a device: no arrays, no weights."""
