"""Replicas on Ray Serve, behind one address: ``ragcache_deployment``."""
