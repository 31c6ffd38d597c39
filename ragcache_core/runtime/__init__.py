"""What client and plugin share of the machine: environment variables, sessions, shared memory, files."""
