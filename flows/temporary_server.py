"""Prefect's temporary server for one command, where no API is configured.

The one that Prefect starts by itself is in the terminal's process group. Ctrl-C ends it before the flow, which then
calls it in vain, and a flow that is killed leaves it running. This one is out of the terminal's reach, and ends with
the process that asked for it, however that ends: its standard input is then at its end.
"""

import atexit
import http.client
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from typing import IO, Any

HOST = "127.0.0.1"
STOP_SECONDS = 5.0
_DRAIN_SECONDS = 3  # of them, for requests under way
_SAID_BYTES = 16_384  # of what the server said before it failed


def start_server() -> Callable[[], None]:
    """Start a server as Prefect's API of this process, unless one is configured or a temporary one is not allowed.

    Returns:
        What waits until it answers, and raises RuntimeError if it does not.
    """
    from prefect.context import refresh_global_settings_context
    from prefect.settings import get_current_settings

    settings = get_current_settings()
    if settings.api.url or not settings.server.ephemeral.enabled:
        return lambda: None
    said = tempfile.TemporaryFile()  # noqa: SIM115 - read if the server fails
    # It takes over a socket that listens already, so that no port is lost to another process, and a request may wait.
    with socket.create_server((HOST, 0), backlog=128) as listener:
        port = listener.getsockname()[1]
        server = subprocess.Popen(
            [sys.executable, "-P", __file__, str(listener.fileno())],
            env=os.environ | settings.to_environment_variables(exclude_unset=True),
            stdin=subprocess.PIPE,
            stdout=said,
            stderr=said,
            pass_fds=[listener.fileno()],
            start_new_session=True,
        )
    atexit.register(_stop, server)  # after Prefect has sent the last events, which it does before
    os.environ["PREFECT_API_URL"] = f"http://{HOST}:{port}/api"
    refresh_global_settings_context()
    return lambda: _await_answer(server, port, settings.server.ephemeral.startup_timeout_seconds, said)


def _await_answer(server: subprocess.Popen[bytes], port: int, seconds: float, said: IO[bytes]) -> None:
    connection = http.client.HTTPConnection(HOST, port, timeout=seconds)
    try:
        connection.request("GET", "/api/health")
        status = connection.getresponse().status
        failure = "" if status == http.HTTPStatus.OK else f"it answered with status {status}"
    except TimeoutError:
        failure = f"no answer within {seconds:g} s (PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS)"
    except (OSError, http.client.HTTPException):
        failure = "it ended"
    finally:
        connection.close()
    if failure:
        _stop(server)
        said.seek(0)
        last = said.read()[-_SAID_BYTES:].decode(errors="replace").strip()
        raise RuntimeError(f"Prefect's temporary server did not start: {failure}\n{last}".strip())


def _stop(server: subprocess.Popen[bytes]) -> None:
    assert server.stdin
    server.stdin.close()
    try:
        server.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        server.kill()
        server.wait()


def _serve(listener: socket.socket) -> None:
    """Answer on a socket that listens, until standard input ends."""
    # A signal to everything that belongs to the run must not end what the run still reports to.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM, signal.SIGHUP})
    servers: list[Any] = []

    def watch() -> None:
        os.read(sys.stdin.fileno(), 1)
        for server in servers:
            server.should_exit = True
            time.sleep(STOP_SECONDS)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()  # imports take seconds, in which the other end may be gone

    import uvicorn
    from prefect.server.api.server import create_app

    app = create_app(ephemeral=True, final=True)
    config = uvicorn.Config(app, lifespan="on", log_level="error", timeout_graceful_shutdown=_DRAIN_SECONDS)
    servers.append(uvicorn.Server(config))
    servers[0].run(sockets=[listener])


if __name__ == "__main__":
    _serve(socket.socket(fileno=int(sys.argv[1])))
