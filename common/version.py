"""Defines the version of all programs in this repository."""

VERSION = "0.1.0"
