"""Backends as processes: spawned on first use, watched, restarted, unloaded, never orphaned."""
