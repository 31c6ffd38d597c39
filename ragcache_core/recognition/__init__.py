"""Recognition of registered documents in the token ids of prompts.

::

    text -> forms -> tokens, edges -> Registration -> RegistrationLog -> Registry of each API server
    prompt's tokens -> find_documents(registries) -> Recognition: spans, access groups, longest unknown run

The algorithms read no clock, file or socket. They need numpy alone.
"""

from ragcache_core.recognition.forms import count_edges, text_forms
from ragcache_core.recognition.hashing import PolynomialHash
from ragcache_core.recognition.log import LogChange, RegistrationLog
from ragcache_core.recognition.placement import FoundDocument, Recognition, find_documents
from ragcache_core.recognition.registration import DocumentForm, Registration
from ragcache_core.recognition.registry import MIN_TOKENS, Registry
from ragcache_core.recognition.shown_texts import PromptTexts
from ragcache_core.recognition.token_bytes import bytes_of_tokens

__all__ = [
    "MIN_TOKENS",
    "DocumentForm",
    "FoundDocument",
    "LogChange",
    "PolynomialHash",
    "PromptTexts",
    "Recognition",
    "Registration",
    "RegistrationLog",
    "Registry",
    "bytes_of_tokens",
    "count_edges",
    "find_documents",
    "text_forms",
]
