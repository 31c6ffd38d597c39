"""Several engines in one virtual clock, among which the project's own choice divides the requests."""
