"""Models that turn text into numbers: vectors, relevance of documents, labels of words."""
