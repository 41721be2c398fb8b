"""Models for embedding, reranking and token classification."""
