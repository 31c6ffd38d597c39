"""The Prometheus metrics on `/metrics`."""
