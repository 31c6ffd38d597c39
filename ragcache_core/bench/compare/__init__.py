"""Real engines side by side under the same load: ``ragcache bench``."""
