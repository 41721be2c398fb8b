"""OpenAI's Responses: their request as a chat request, and an answer as items and events."""
