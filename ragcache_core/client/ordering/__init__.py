"""Document order by the engine's cached prefixes."""
