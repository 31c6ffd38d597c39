"""The framework-neutral part of the integrations: search, session, measured call, events."""
