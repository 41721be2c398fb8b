"""Backends as processes: started on first use, monitored, restarted, unloaded, never orphaned."""
