"""Measurements, as ratios to a reference in the same run: `make bench`."""
