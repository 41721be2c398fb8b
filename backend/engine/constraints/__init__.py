"""Grammar-constrained decoding: from a request's constraints to masks of allowed tokens."""
