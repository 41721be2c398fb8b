"""Starts the ranks of one model as processes, and sees that none outlives the others."""
