"""The integrations' framework-neutral core: search, session, measured call, events. It imports no framework."""
