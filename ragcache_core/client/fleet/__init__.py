"""Several replicas of one server, used as one engine."""
