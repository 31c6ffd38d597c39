"""An HTTP server for liveness probes that does not depend on the engine."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Self

from ragcache_core.errors import ConfigError

LIVE = "/live"
_TIMEOUT_S = 5.0


class ProbeServer:
    """Answers ``GET /live`` with status 200 and the text of ``state``; a context manager.

    It says that the process is there that starts the server, and starts it again when it has died.
    """

    def __init__(self, host: str, port: int, state: Callable[[], str]) -> None:
        """Open the port; answering begins with the context.

        Raises:
            ConfigError: the port cannot be used.
        """

        class Handler(BaseHTTPRequestHandler):
            timeout = _TIMEOUT_S

            def do_GET(self) -> None:
                body = json.dumps({"state": state()}).encode() if self.path.partition("?")[0] == LIVE else b""
                self.send_response(200 if body else 404)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                """Log nothing: probes come every few seconds."""

        try:
            self._http = ThreadingHTTPServer((host, port), Handler)
        except OSError as error:
            raise ConfigError(f"probe_port {port} of {host} cannot be used ({error}): choose another port") from error
        self._http.daemon_threads = True
        self._thread = threading.Thread(
            target=self._http.serve_forever, args=(0.1,), name="ragcache-probes", daemon=True
        )

    @property
    def port(self) -> int:
        """The port that the probe server listens on."""
        return int(self._http.server_address[1])

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._http.shutdown()
        self._thread.join()
        self._http.server_close()
