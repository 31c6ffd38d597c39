"""Start a server and supervise it: arguments, environment, process, log, restarts."""
