"""Real client programs, unchanged and in environments of their own, against the gateway."""
