"""Stores the KV of earlier prompts on disk, where it outlives the process."""
