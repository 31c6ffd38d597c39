"""Launch a vLLM server or connect to one, and send it requests."""

from ragcache_core.client.engine import Engine
from ragcache_core.client.engine_client import EngineClient
from ragcache_core.client.fleet.fleet import Fleet
from ragcache_core.client.generation import Generation, GenerationChunk
from ragcache_core.client.http.errors import translate_errors
from ragcache_core.client.prompts.request_plan import RequestPlan

__all__ = [
    "Engine",
    "EngineClient",
    "Fleet",
    "Generation",
    "GenerationChunk",
    "RequestPlan",
    "translate_errors",
]
