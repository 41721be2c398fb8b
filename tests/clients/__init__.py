"""Programs that people point at the gateway, run as they are, in environments of their own."""
