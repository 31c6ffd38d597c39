"""The server's main program: vLLM's OpenAI-compatible server, which ends with its owner process.

Run as ``python -m ragcache_core.vllm_plugin.server <arguments of vLLM's server>`` by
:class:`ragcache_core.client.launch.process.ServerProcess`, which holds the other end of standard input.
"""

from __future__ import annotations

import os
import threading

_OWNER_POLL_S = 1.0
_GRACE_S = 15.0


def end_with_owner(stdin_fd: int = 0) -> threading.Thread:
    """Start and return a thread that ends this process when its owner ends.

    The owner is gone when standard input is at its end, or when our parent is no longer the process that started us
    (a fork of the owner may keep the pipe open). See :func:`end_session`.
    """
    owner_pid = os.getppid()
    gone = threading.Event()

    def read_until_closed() -> None:
        try:
            while os.read(stdin_fd, 4096):
                pass
        except OSError:
            pass
        gone.set()

    def watch() -> None:
        while not gone.wait(_OWNER_POLL_S):
            if os.getppid() != owner_pid:
                break
        # Not a daemon: if the main thread ends first, the interpreter waits for it.
        threading.Thread(target=end_session, name="ragcache-end", daemon=False).start()

    threading.Thread(target=read_until_closed, name="ragcache-owner-pipe", daemon=True).start()
    watcher = threading.Thread(target=watch, name="ragcache-owner-watch", daemon=True)
    watcher.start()
    return watcher


def end_session() -> None:
    """Kill all of this process's session, then this process; does not return.

    A main process that gets SIGTERM while vLLM loads ignores it, or dies of it and leaves its children behind. So the
    others go first: SIGTERM, after a grace period SIGKILL.
    """
    from ragcache_core.runtime.environment import ENGINE_ID_ENV
    from ragcache_core.runtime.sessions import kill_session, terminate_session
    from ragcache_core.runtime.shared_memory import remove_files

    session_id = os.getsid(0)
    terminate_session(session_id, _GRACE_S)
    kill_session(session_id)
    if engine_id := os.environ.get(ENGINE_ID_ENV):
        remove_files(engine_id)
    os._exit(0)


def main() -> None:
    """Watch the owner, then run vLLM's server with the command line's arguments."""
    end_with_owner()
    from ragcache_core.vllm_plugin.server.api_server import run_api_server

    run_api_server()


if __name__ == "__main__":
    main()
