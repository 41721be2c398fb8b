"""The endpoints: each leases a model and hands the body to the room that knows its API."""
