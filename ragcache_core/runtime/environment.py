"""The environment variables shared by launcher and server, and those with a server's address for frameworks."""

from __future__ import annotations

BASE_URL_ENV = "RAGCACHE_BASE_URL"
"""Server address for a chat model or LLM without an engine or address."""
API_KEY_ENV = "RAGCACHE_API_KEY"
"""The key of a connected server, or of one that ``ragcache serve`` starts."""
CPU_KV_CACHE_BYTES_ENV = "RAGCACHE_CPU_KV_CACHE_BYTES"
"""The server's default size of the KV cache on a CPU: vLLM would take 92 % of the machine's memory, and refuse to start
where less is free."""
ENGINE_ID_ENV = "RAGCACHE_ENGINE_ID"
"""The server's own regions of shared memory, which it removes when its owner dies."""
SOCKETS_ENV = "VLLM_RPC_BASE_PATH"
"""vLLM's own: in which folder its processes make their sockets; where they meet first, too, with our workers."""
STARTED_AGAIN_ENV = "RAGCACHE_STARTED_AGAIN"
"""Marks a restarted server, which continues without tiers that it cannot open."""
RECORD_TRACE_ENV = "RAGCACHE_RECORD_TRACE"
"""Trace file of a server: start in seconds since 1970, a colon, and the path."""
HANG_TIMEOUT_ENV = "RAGCACHE_HANG_TIMEOUT_S"
"""Seconds without an answer and CPU time after which an engine counts as hung; 0 disables the check."""
TENANT_METRICS_ENV = "RAGCACHE_TENANT_METRICS"
"""Number of tenants with their own metrics on ``/metrics``, the first in their file; 0 by default. All others are
summed."""
