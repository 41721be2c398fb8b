"""The backend process: one language model behind the wire of `backend.proto`."""
