"""Starts the ranks of one model on this machine as processes, and ends them together."""
