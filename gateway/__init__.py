"""The HTTP gateway: an OpenAI-compatible host in front of backends that speak `backend.proto`."""
