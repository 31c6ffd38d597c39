"""An event loop in a thread of its own, for requests that no caller waits for yet."""

from __future__ import annotations

import httpx

from ragcache_core.client.http.routing import AsyncRoutedTransport, Replicas
from ragcache_core.client.http.waiting import async_patient_transport
from ragcache_core.runtime.event_loop_thread import EventLoopThread

_LIMITS = httpx.Limits(max_connections=None, max_keepalive_connections=8, keepalive_expiry=2.0)
"""Nothing is sent again here, so an idle connection has to end before the server ends it."""


class BackgroundLoop(EventLoopThread):
    """A thread that runs an event loop, and the connections that live there. :meth:`close` ends both.

    ``transport`` is for the work that :meth:`run` is given; it sends nothing again.
    """

    def __init__(self, name: str, *, verify: bool, replicas: Replicas | None = None) -> None:
        """Start the thread. ``verify``: whether the server has a certificate to check.

        With ``replicas`` each request goes to the one that is chosen for it.
        """
        inner = async_patient_transport(_LIMITS, httpx.create_ssl_context(verify=verify))
        self.transport: httpx.AsyncBaseTransport = inner if replicas is None else AsyncRoutedTransport(replicas, inner)
        super().__init__(name, at_end=self.transport.aclose)
