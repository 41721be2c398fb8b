"""Embedding, reranking and token classification models."""
