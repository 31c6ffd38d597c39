"""Every error RAGCache raises on purpose, in one tree.

::

    RAGCacheError
    ├── ConfigError (ValueError)             a setting that cannot work
    ├── EngineError                          the inference server
    │   ├── EngineStartError                 it did not become ready: no model, port taken, died while loading
    │   ├── EngineUnreachableError           nothing answers at that address
    │   ├── EngineAuthError                  it answered: wrong API key
    │   ├── EngineDiedError                  it died during a request
    │   ├── EngineTimeoutError               it did not answer in time
    │   │   └── EngineHungError              it answers no request
    │   ├── EngineClosedError                the handle was used after close()
    │   │   └── EngineForkedError            the handle was used in a fork
    │   └── RequestRejectedError             it rejected the request; the message is its own
    ├── PromptError (ValueError)             a prompt that cannot be built
    │   ├── PromptTooLongError               more tokens than the context window
    │   └── TokenizerUnavailableError        the server does not tell tokens
    ├── StoreError                           the document store on disk
    │   ├── StoreNotFoundError               no store at that path
    │   ├── StoreExistsError                 a store is at that path already
    │   ├── StoreCorruptError                a truncated, damaged or foreign file
    │   ├── StoreVersionError                written by a newer RAGCache
    │   ├── StoreLockedError                 another process writes to it
    │   ├── StoreFullError                   no space left while saving
    │   ├── EmptyStoreError                  a search before anything was added
    │   └── EmbedderMismatchError (ValueError)  the embedder is not the one the store was built with
    ├── DocumentError (ValueError)           a document that cannot be stored
    │   ├── EmptyDocumentError
    │   ├── UndecodableDocumentError         binary, or not UTF-8
    │   ├── DuplicateDocumentError
    │   └── UnknownDocumentError (KeyError)
    ├── SearchError (ValueError)             a query that cannot be answered
    │   ├── TooFewDocumentsError             check_k() with a k that is larger than the store
    │   └── SearchTimeoutError (TimeoutError)  the documents were not final in time
    ├── TraceError (ValueError)              a trace of requests that cannot be read, or a log that holds none
    └── CacheTierError                       the cache of KV chunks on disk
        ├── CacheDirectoryError              missing and not to be made, unwritable, not a directory
        ├── CacheLockedError                 another engine keeps its cache there
        ├── CacheVersionError                written by a newer RAGCache
        ├── CacheCapacityError (ValueError)  zero, negative, larger than the disk; or the cache is full
        └── CacheWriteError                  no space left, a failing disk; what was stored before is intact

A message holds the value, the limit and the cure. Errors that are a caller's mistake are also ``ValueError``
(or ``KeyError``), so that code which knows nothing of RAGCache handles them as usual. A lost or damaged *cache*
entry is never an error: it is a miss.
"""

from __future__ import annotations

from pathlib import Path


class RAGCacheError(Exception):
    """Base of every error that RAGCache raises on purpose."""


class ConfigError(RAGCacheError, ValueError):
    """A setting has a value that cannot work."""


class EngineError(RAGCacheError):
    """The inference server failed, or could not be used."""


class EngineStartError(EngineError):
    """The server did not become ready. The message holds its last error and the path of its log."""


class EngineUnreachableError(EngineError):
    """Nothing answers at the server's address."""


class EngineAuthError(EngineError):
    """The server answered that the API key is wrong or missing."""


class EngineDiedError(EngineError):
    """The server died while a request was running and the request could not be retried."""


class EngineTimeoutError(EngineError):
    """The server did not answer in the time given."""


class EngineHungError(EngineTimeoutError):
    """The server is there, but its engine makes no progress; the message says since when."""


class EngineClosedError(EngineError):
    """The engine handle was used after it had been closed."""


class EngineForkedError(EngineClosedError):
    """The engine handle was used in a fork of the process that made it."""


class RequestRejectedError(EngineError):
    """The server refused a request; the message is the server's own."""


class PromptError(RAGCacheError, ValueError):
    """A prompt cannot be laid out."""


class PromptTooLongError(PromptError):
    """The prompt has more tokens than the model's context window has space for."""


class TokenizerUnavailableError(PromptError):
    """The server does not report the tokens of a prompt."""


class StoreError(RAGCacheError):
    """The document store on disk failed, or could not be used."""


class StoreNotFoundError(StoreError):
    """There is no document store at that path."""


class StoreExistsError(StoreError):
    """There is a document store at that path already."""


class StoreCorruptError(StoreError):
    """A file of the store is missing, truncated, or does not have the recorded SHA-256."""


class StoreVersionError(StoreError):
    """The store was written by a newer version of RAGCache."""


class StoreLockedError(StoreError):
    """Another process is writing to the store."""


class StoreFullError(StoreError):
    """The disk is full. What was stored before is intact."""


class EmptyStoreError(StoreError):
    """The store holds no documents yet."""


class EmbedderMismatchError(StoreError, ValueError):
    """The embedder is not the one that the store was built with."""


class DocumentError(RAGCacheError, ValueError):
    """A document cannot be stored."""


class EmptyDocumentError(DocumentError):
    """The document has no text."""


class UndecodableDocumentError(DocumentError):
    """The file is binary, or is not UTF-8."""


class DuplicateDocumentError(DocumentError):
    """The document id is in the store, or in the same batch, already."""


class UnknownDocumentError(DocumentError, KeyError):
    """No document with that id is in the store."""

    def __str__(self) -> str:  # KeyError would print the repr of the message
        return str(self.args[0]) if self.args else ""


class SearchError(RAGCacheError, ValueError):
    """A query cannot be answered: not a finite vector, an impossible k, impossible stages."""


class TooFewDocumentsError(SearchError):
    """More documents were asked for than the store holds."""


class SearchTimeoutError(SearchError, TimeoutError):
    """A search did not end in the time given."""


class TraceError(RAGCacheError, ValueError):
    """A trace, or a log that is to become one, cannot be read; ``path`` and ``line`` say where."""

    def __init__(self, message: str, path: Path | None = None, line: int | None = None) -> None:
        place = "" if path is None else f"{path}: " if line is None else f"{path}:{line}: "
        super().__init__(place + message)
        self.path = path
        self.line = line


class CacheTierError(RAGCacheError):
    """The cache of KV chunks on disk failed, or could not be used."""


class CacheDirectoryError(CacheTierError):
    """The cache's directory cannot be made or written, or is not a directory."""


class CacheLockedError(CacheTierError):
    """Another engine keeps its cache in the same directory."""


class CacheVersionError(CacheTierError):
    """The cache was written by a newer version of RAGCache."""


class CacheCapacityError(CacheTierError, ValueError):
    """The capacity of the cache cannot work, or has no space for what is to be written."""


class CacheWriteError(CacheTierError):
    """The cache could not be written: no space left, read-only, a failing disk. What was stored before is intact.

    After a failed ``ChunkStore.clear`` nothing is found any more; part of it may still lie on the disk.
    """


def quoted(value: object, max_chars: int = 80) -> str:
    """Return a value as an error shows it: the beginning of its ``repr``, whatever it is."""
    try:
        return f"{value!r:.{max_chars}}"
    except ValueError:  # Python refuses to write such a number
        return "a number of thousands of digits"
    except RecursionError:
        return "a value that is nested too deep to show"
