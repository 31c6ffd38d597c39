"""Several replicas of one server, asked as one engine."""
