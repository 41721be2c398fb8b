"""Grammar-constrained decoding: from what a request asks for to the tokens allowed next."""
