"""The log: one tree of loggers, and event codes of warnings and errors, with meaning and action.

A message begins with its code, as in ``RC-TIER-OFF: RAGCache's disk tier is out of service``, so that it is the same
in every log. ``docs/reference/log-events.md`` is made from :data:`LOG_EVENTS`.
"""

from __future__ import annotations

import logging
import re
import time
from typing import Final, Literal, NamedTuple

ROOT: Final = "ragcache"
_LIMIT_S: Final = 60.0
_CODE: Final = re.compile(r"(RC(?:-[A-Z]+)+): ")


class LogEvent(NamedTuple):
    """The meaning of an event code.

    Attributes:
        level: its level.
        meaning: what has happened, and what follows.
        action: what to do.
        is_limited: it may come with every request or read, and is logged at most once a minute in a process.
    """

    level: Literal["WARNING", "ERROR"]
    meaning: str
    action: str
    is_limited: bool = False


LOG_EVENTS: Final[dict[str, dict[str, LogEvent]]] = {
    "Engine": {
        "RC-CACHE-OFF": LogEvent(
            "WARNING",
            "RAGCache does not know this vLLM release. vLLM schedules and caches alone.",
            "Install a supported vLLM, or a newer RAGCache: see [upgrade](../operate/upgrade.md).",
        ),
        "RC-TREE-OFF": LogEvent(
            "WARNING",
            "The tree cannot order this model's KV cache groups. GPU and host keep LRU order, without a disk tier.",
            "None: see the [support matrix](support.md).",
        ),
        "RC-PROFILE-UNUSED": LogEvent(
            "WARNING",
            "The measured profile cannot be read. RAGCache estimates the cost of a prefill.",
            "Run `ragcache profile MODEL`.",
        ),
        "RC-METADATA-IGNORED": LogEvent(
            "WARNING",
            "The documents that a request names contradict its prompt. It runs without them. Logged once.",
            "Correct the client. `ragcache_ignored_metadata_total` counts such requests.",
        ),
        "RC-HINT-CLIPPED": LogEvent(
            "WARNING",
            "A request asks for a longer retention than `max_retain_s`. It is shortened. Logged once.",
            "Raise `CacheConfig.max_retain_s`, or ask for less. `ragcache_clipped_hints_total` counts such requests.",
        ),
        "RC-ADAPTER-CHANGED": LogEvent(
            "WARNING",
            "The files of a LoRA adapter changed after it was loaded. Its requests reuse no KV.",
            "Load it again with `load_inplace`.",
            is_limited=True,
        ),
        "RC-WEIGHTS-CHANGED": LogEvent(
            "WARNING",
            "The model's weights changed. Host and disk tier are emptied, and nothing outlives this engine.",
            "Restart the engine when the weights are final.",
        ),
        "RC-ENGINE-HANGS": LogEvent(
            "ERROR",
            "The engine makes no progress. `/health` answers 503.",
            "None: its supervisor restarts it. Keep the log for a report.",
        ),
        "RC-ENGINE-PROGRESSES": LogEvent("WARNING", "The engine makes progress again.", "None."),
        "RC-TIERS-UNREPORTED": LogEvent(
            "WARNING",
            "The statistics have no tiers until the first request.",
            "Set `--kv-transfer-config` and `--scheduler-cls` together.",
        ),
        "RC-EXPIRY-LATE": LogEvent(
            "WARNING",
            "Expired KV could not be deleted, and stays until the next request.",
            "Look for an earlier error.",
        ),
        "RC-TRACE-ENDED": LogEvent(
            "WARNING",
            "The recorded trace cannot be written any more, as on a full disk. Requests are served.",
            "Free space, and record again.",
        ),
        "RC-MEMORY-REMOVED": LogEvent("WARNING", "A crashed engine left shared memory, which is removed.", "None."),
    },
    "Tiers": {
        "RC-HOST-OFF": LogEvent(
            "WARNING",
            "The host tier is off: no block fits into `host_bytes`, or the workers cannot share memory.",
            "Follow the reason in the line, such as to raise `host_bytes`.",
        ),
        "RC-TIERS-OFF": LogEvent(
            "WARNING",
            "Only the GPU tier is there: a pipeline stage needs more memory than the first.",
            "See [several GPUs and engines](../operate/parallel.md).",
        ),
        "RC-WORKERS-APART": LogEvent(
            "WARNING",
            "Workers share no memory, so there is no disk tier, and the host tier ends with the engine.",
            "Keep all workers on one host.",
        ),
        "RC-HOST-HELD": LogEvent(
            "WARNING",
            "The host tier cannot take a request's KV, because copies or requests hold all that it has. That KV is not "
            "stored yet. Requests go on.",
            "None if it comes seldom. Else raise `host_bytes`, or look for a slow disk.",
            is_limited=True,
        ),
        "RC-HOST-SMALL": LogEvent(
            "WARNING",
            "The host tier has less than half the size of the GPU KV cache, so it seldom has a hit.",
            "Raise `host_bytes`.",
        ),
        "RC-HOST-NOT-KEPT": LogEvent(
            "WARNING",
            "The host tier's journal cannot be written. The tier works, and is empty after a restart.",
            "Free space in `/dev/shm`.",
        ),
        "RC-TIER-OFF": LogEvent(
            "ERROR",
            "A disk or the shared store failed or hangs, or its files are gone. The log says when it is opened again.",
            "See [the disk tier went off](../operate/troubleshooting.md#the-disk-tier-went-off).",
        ),
        "RC-TIER-UNCLOSED": LogEvent(
            "ERROR",
            "A lower tier could not be shut down. Its last writes may be missing. The next start checks what it has.",
            "See the traceback.",
        ),
        "RC-TIER-FAILED": LogEvent(
            "WARNING",
            "A write (a full disk) or the shared store failed. It is tried again later; new KV is dropped.",
            "Free space, or check the store.",
        ),
        "RC-TIER-WORKS": LogEvent(
            "WARNING", "What failed with `RC-TIER-FAILED` or `RC-TIER-OFF` works again.", "None."
        ),
        "RC-DISK-SLOW": LogEvent(
            "WARNING",
            "The disk writes slower than KV is computed. Blocks are dropped. Logged once, then counted.",
            "Use a faster disk, or accept the drops.",
        ),
        "RC-DISK-UNREADABLE": LogEvent(
            "WARNING", "Stored KV cannot be read: a miss.", "Check the disk.", is_limited=True
        ),
        "RC-DISK-DAMAGED": LogEvent(
            "WARNING",
            "Stored KV does not match its checksum, or its metadata is inconsistent: a miss.",
            "None if it comes once, as after a power cut. Else replace the disk.",
            is_limited=True,
        ),
        "RC-DISK-DISCARDED": LogEvent(
            "WARNING",
            "Blocks without their prefix, or damaged ones, were discarded at the start, as after a crash.",
            "None.",
        ),
        "RC-DISK-INDEX": LogEvent(
            "WARNING",
            "The index of a cache directory is damaged, or belongs to another one. The cache starts empty.",
            "None; check the disk if it repeats.",
        ),
        "RC-DISK-HANGS": LogEvent(
            "ERROR",
            "The disk did not answer when the engine closed. What was written is found at the next start.",
            "Check the disk.",
        ),
        "RC-RESET-LATE": LogEvent(
            "ERROR",
            "The caches were reset while the disk did not answer. It is emptied when it answers.",
            "If the engine ends before that, delete the named directory.",
        ),
        "RC-RESET-FAILED": LogEvent(
            "ERROR",
            "The disk still has KV from before a reset, which could not be deleted.",
            "Delete the cache directory before the next start.",
        ),
        "RC-OLD-CACHE-DELETED": LogEvent("WARNING", "The files of an unused or older cache were deleted.", "None."),
        "RC-OLD-CACHE-KEPT": LogEvent(
            "WARNING", "An old cache cannot be deleted: missing rights, or a busy file.", "Delete it yourself."
        ),
        "RC-FOREIGN-FILES": LogEvent(
            "WARNING", "An old cache directory has files of others, which stay.", "Remove them yourself."
        ),
        "RC-PLAINTEXT-KEPT": LogEvent(
            "WARNING",
            "A cache beside an encrypted one is not encrypted, and is not deleted.",
            "Delete it, or use another directory.",
        ),
        "RC-SHARED-UNREACHABLE": LogEvent(
            "WARNING",
            "The shared store does not answer at the start. The engine tries it again later.",
            "Check network and password.",
        ),
        "RC-SHARED-COMPRESSED": LogEvent(
            "WARNING",
            "The shared store has compressed blocks, and this engine cannot unpack them: they are misses. Logged once.",
            "`pip install 'ragcache[compression]'`.",
        ),
        "RC-SHARED-UNDELETED": LogEvent(
            "WARNING",
            "The engine closed before the shared store deleted all that was to be forgotten.",
            "Delete what begins with the named prefix.",
        ),
    },
    "Chunk reuse": {
        "RC-KERNELS-OFF": LogEvent(
            "WARNING",
            "A Triton kernel does not compile. PyTorch or vLLM does its work, slower.",
            "Install a compiler; else none.",
        ),
        "RC-NOT-PAGE-LOCKED": LogEvent(
            "WARNING", "Host memory of chunks is not page-locked. Its copies are slower.", "Raise `ulimit -l`."
        ),
    },
    "Tenants and recognition": {
        "RC-TENANTS-REJECTED": LogEvent(
            "ERROR", "The changed file of tenants has an error. The keys before stay valid.", "Correct the file."
        ),
        "RC-TENANTS-CHANGED": LogEvent("WARNING", "The keys of the changed file of tenants are valid now.", "None."),
        "RC-TENANTS-RESTART": LogEvent(
            "WARNING", "Some changes of the file of tenants need a restart.", "Restart the server."
        ),
        "RC-RECOGNITION-OFF": LogEvent(
            "WARNING",
            "The server does not recognise documents of plain clients. RAGCache's own clients ask once more each time.",
            "Install a [supported vLLM](../dev/vllm-versions.md), or follow the reason in the line.",
        ),
        "RC-NOT-REGISTERED": LogEvent(
            "WARNING",
            "The server did not register some documents of a store. Logged once for a client.",
            "Follow the reason in the line, and run `ragcache index --register`.",
        ),
        "RC-REGISTRATIONS-GONE": LogEvent(
            "WARNING",
            "A server has no registered documents: it restarted without a disk tier, or is another replica.",
            "Give it a `directory`, or call `engine.register` again. Documents of retrievers are registered again.",
        ),
        "RC-REGISTRATIONS-LOST": LogEvent(
            "WARNING",
            "The file of registered documents is damaged. Plain requests share no KV until then.",
            "Delete `registrations-*.journal`, and register every document again.",
        ),
        "RC-REGISTRATIONS-NOT-KEPT": LogEvent(
            "WARNING",
            "The file of registered documents cannot be written. They are lost at the next restart.",
            "Free space, restart, and register them again.",
        ),
        "RC-REGISTRATIONS-BEHIND": LogEvent(
            "WARNING",
            "An API server did not get what others registered. It tries again.",
            "None, unless it lasts: look for an earlier error.",
        ),
    },
    "Connection to engines": {
        "RC-ENGINE-RESTARTS": LogEvent(
            "WARNING",
            "The engine crashed or hung, and is restarted.",
            "Read the lines before. See [failures](../operate/failures.md).",
        ),
        "RC-ENGINE-READY": LogEvent("WARNING", "The restarted engine is ready.", "None."),
        "RC-ENGINE-AWAY": LogEvent(
            "WARNING", "The engine does not answer. Completions wait for it.", "Look at the server's log."
        ),
        "RC-ENGINE-BACK": LogEvent("WARNING", "The engine answers again.", "None."),
        "RC-REQUEST-RESENT": LogEvent(
            "WARNING",
            "No first token came in time. The request is cancelled, and sent once more.",
            "Raise `first_token_timeout_s`, or add replicas.",
            is_limited=True,
        ),
        "RC-PROXY-HEADERS": LogEvent(
            "WARNING",
            "A proxy removes RAGCache's headers. Statistics and confirmations may reach another replica.",
            "Let `x-session-id` and `x-ragcache-*` pass. See [proxies](../operate/proxies.md#the-headers).",
        ),
        "RC-REPLICA-WAIT": LogEvent(
            "WARNING", "No replica of the fleet answers yet. The client waits for one.", "Start the replicas."
        ),
        "RC-REPLICA-NONE": LogEvent(
            "WARNING", "The look-up finds no replica. The known ones stay.", "Check the name service."
        ),
        "RC-REPLICA-LOOKUP": LogEvent(
            "ERROR", "The look-up of replicas failed. It is tried again.", "Look at the traceback.", is_limited=True
        ),
        "RC-REPLICA-REJECTED": LogEvent(
            "WARNING", "A replica answers, but cannot be used.", "Follow the reason in the line: model, key, version."
        ),
        "RC-REPLICA-DIFFERS": LogEvent(
            "ERROR",
            "A replica of Ray Serve serves another model than the oldest one, and gets no requests.",
            "Put the same model on every node.",
        ),
        "RC-REPLICA-FAILED": LogEvent(
            "WARNING",
            "A replica of Ray Serve did not answer. The request goes to another one.",
            "Look at the replica's log.",
            is_limited=True,
        ),
    },
    "Prompts and searches": {
        "RC-ORDER-OFF": LogEvent(
            "WARNING",
            "The cache index is not available. Documents keep the order of retrieval.",
            "Check the key and the server's version.",
        ),
        "RC-DOCUMENTS-UNKNOWN": LogEvent(
            "WARNING",
            "Long prompts have no known document. They are cached as plain text.",
            "Show documents unchanged, or call `engine.remember_documents`.",
        ),
        "RC-QUESTION-FIRST": LogEvent(
            "WARNING",
            "The prompt shows the question or the history before the documents. No other question reuses their KV.",
            "Put the context first.",
        ),
        "RC-SCOPE-UNKNOWN": LogEvent(
            "WARNING",
            "Requests of this engine differ in model, salt or key, so no search is overlapped with prefill.",
            "Bind the prompt with `bind_prompt(..., settings=...)`.",
        ),
        "RC-PROMPT-UNBOUND": LogEvent(
            "WARNING",
            "The prompt cannot be made before its question is known. No search is overlapped with prefill.",
            "Bind the prompt and the `format_docs` that the chain uses.",
        ),
        "RC-SPECULATION-OFF": LogEvent(
            "WARNING",
            "The server has no scheduler of RAGCache's. Requests are sent when the search has ended.",
            "Start it with `ragcache serve` or `Engine.launch`.",
        ),
        "RC-SPECULATION-FAILED": LogEvent(
            "WARNING",
            "A speculative request could not be made. The answer is not affected.",
            "Correct the prompt or `format_docs` for the candidates in the line.",
            is_limited=True,
        ),
        "RC-CALLBACK-FAILED": LogEvent(
            "ERROR", "A callback of a speculative request raised.", "Correct the callback.", is_limited=True
        ),
        "RC-SEARCH-BLOCKED": LogEvent(
            "WARNING",
            "A search ended long after its time-out, because its source blocks the event loop.",
            "Run what blocks with `asyncio.to_thread`.",
            is_limited=True,
        ),
        "RC-SOURCE-OPEN": LogEvent(
            "WARNING",
            "A retriever's stages could not be closed, or not in time.",
            "Correct the clean-up of the source.",
            is_limited=True,
        ),
        "RC-MODEL-FOREIGN": LogEvent(
            "WARNING",
            "The chain's model is none of RAGCache's. It gets its request when the search has ended.",
            "Use `ChatRAGCache` or `RAGCacheLLM`.",
        ),
    },
    "Stores and answer cache": {
        "RC-DOCUMENTS-BLANK": LogEvent("WARNING", "Documents without a text are not stored.", "None."),
        "RC-DOCUMENTS-NEW": LogEvent(
            "WARNING",
            "A reranker returned documents that it was not given. They are cached under their own names.",
            "None.",
        ),
        "RC-SEARCH-UNSTAGED": LogEvent(
            "WARNING",
            "This release of Faiss differs from the tested one. An IVF index is searched in one stage.",
            "Install the Faiss of `requirements/lock.txt`.",
        ),
        "RC-STORE-WORDLESS": LogEvent(
            "WARNING",
            "An older RAGCache made the store. It is searched by vectors alone, which seldom find names.",
            "Add its documents to a new store.",
        ),
        "RC-STORE-UNCONVERTED": LogEvent(
            "WARNING",
            "The store cannot be written, so it keeps its format and is indexed again at each start.",
            "Free space, or allow writing.",
        ),
        "RC-STORE-FILES-LEFT": LogEvent(
            "WARNING",
            "Files of an older or failed change stay in the store, until it is opened again.",
            "Free space, or allow writing.",
        ),
        "RC-STORE-UNSAVED": LogEvent(
            "WARNING",
            "The store's index was not saved. It is brought up to date when the store is opened.",
            "Free space, or allow writing.",
        ),
        "RC-ANSWERS-UNSAVED": LogEvent(
            "WARNING",
            "A change of the answer cache is not on disk, and is lost with the process. Logged once.",
            "Free space, or allow writing.",
        ),
        "RC-ANSWER-UNREADABLE": LogEvent(
            "WARNING", "A cached answer cannot be read: a miss.", "None.", is_limited=True
        ),
        "RC-ANSWER-UNCACHED": LogEvent(
            "WARNING", "An answer cannot be written as JSON, and is not cached.", "None.", is_limited=True
        ),
        "RC-QUESTION-UNEMBEDDED": LogEvent(
            "WARNING",
            "The embedder failed for a question. Only the same question gets its cached answer.",
            "Correct the embedder.",
            is_limited=True,
        ),
    },
}
_BY_CODE: Final = {code: event for group in LOG_EVENTS.values() for code, event in group.items()}


def logger_of(module: str) -> logging.Logger:
    """Return a module's logger below :data:`ROOT`: ``ragcache.core.tree`` for ``ragcache_core.tree``."""
    logger = logging.getLogger(f"{ROOT}.{module.removeprefix('ragcache_')}")
    logger.addFilter(LIMIT)
    return logger


def join_tree(parent: str) -> None:
    """Send this process's log to the handlers of the logger ``parent``, at its level."""
    logging.getLogger(ROOT).parent = logging.getLogger(parent)
    for name in list(logging.root.manager.loggerDict):  # a configuration may have disabled those that it does not name
        if name.startswith(ROOT + "."):
            logging.getLogger(name).disabled = False


def split_code(message: str) -> tuple[str | None, str]:
    """Return the event code at the beginning of a message (or ``None``), and the rest."""
    found = _CODE.match(message)
    return (None, message) if found is None else (found[1], message[found.end() :])


class _Limit(logging.Filter):
    """Lets a frequent event pass once a minute."""

    def __init__(self) -> None:
        super().__init__()
        self._next_s: dict[str, float] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        code, _ = split_code(str(record.msg))
        if code is None or code not in _BY_CODE or not _BY_CODE[code].is_limited:
            return True
        now_s = time.monotonic()
        if now_s < self._next_s.get(code, now_s):
            return False
        self._next_s[code] = now_s + _LIMIT_S
        return True

    def clear(self) -> None:
        """Let every event pass again."""
        self._next_s.clear()


LIMIT: Final = _Limit()
