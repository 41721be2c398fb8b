"""The backend process: serves one model over the protocol in `backend.proto`."""
