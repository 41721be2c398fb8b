"""What a new user runs first: downloads and converts the default model, and asks it a question."""
