"""Minutes of everything that hosts send at once, and what it leaves behind in the process."""
