"""Prompt caches on disk: the KV of earlier prompts outlives the process."""
