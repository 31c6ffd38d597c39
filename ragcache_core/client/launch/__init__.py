"""Start a server and look after it: arguments, environment, process, log, restarts."""
