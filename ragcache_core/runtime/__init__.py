"""Machine-level code of client and plugin: environment variables, sessions, shared memory, files."""
