"""The version of everything in this repository."""

VERSION = "0.1.0"
