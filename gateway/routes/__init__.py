"""The endpoints: each leases a model and passes the body to the package for its API."""
