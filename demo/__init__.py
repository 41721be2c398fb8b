"""What a newcomer runs first: the default model, fetched and converted, and one answer from it."""
