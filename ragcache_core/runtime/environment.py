"""The environment variables shared by launcher and server, and those with a server's address for frameworks."""

from __future__ import annotations

BASE_URL_ENV = "RAGCACHE_BASE_URL"
"""The server's address for a chat model or an LLM without an engine or an address of its own."""
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
"""Tells the server that it has served before: what it can no longer have, it goes on without."""
RECORD_TRACE_ENV = "RAGCACHE_RECORD_TRACE"
"""Tells the server to record its requests as a trace: since when, in seconds since 1970, a colon, and the file."""
HANG_TIMEOUT_ENV = "RAGCACHE_HANG_TIMEOUT_S"
"""Tells the server after how many seconds an engine hangs that answers nothing and uses no processor time; 0: never."""
TENANT_METRICS_ENV = "RAGCACHE_TENANT_METRICS"
"""Tells the server of how many tenants ``/metrics`` has series of their own, the first in their file; by default of
none. All others are one series."""
