"""Divides a model among ranks: processes, on one machine or several, that each have a part."""
