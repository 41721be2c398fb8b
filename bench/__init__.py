"""Measurements as ratios against references of the same run: `make bench`."""
