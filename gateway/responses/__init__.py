"""OpenAI's Responses API: requests as chat requests, and answers as items and events."""
