"""`make chat`: a conversation in the terminal. It knows nothing of the gateway but its HTTP API."""
