"""Launch or join a vLLM server, and ask it."""

from ragcache_core.client.engine import Engine
from ragcache_core.client.failures import translate_errors
from ragcache_core.client.generation import Generation, GenerationChunk
from ragcache_core.client.plan import RequestPlan
from ragcache_core.client.tokenizer import ModelTokenizer

__all__ = ["Engine", "Generation", "GenerationChunk", "ModelTokenizer", "RequestPlan", "translate_errors"]
