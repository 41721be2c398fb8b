"""Defines the limit of a Rerank request, which the gateway and the backend share."""

MOST_DOCUMENTS = 10_000
