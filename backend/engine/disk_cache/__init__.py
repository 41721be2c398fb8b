"""Prompt caches on disk: the KV of earlier prompts survives the process."""
