"""The only folder that imports vLLM. Nothing imports it but the engine's own process."""
