"""Starts the ranks of one model as processes, and ends them together."""
