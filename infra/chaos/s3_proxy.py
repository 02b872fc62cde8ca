"""A proxy in front of an S3 server that misbehaves when told to: errors, resets, late and slow answers.

It passes requests on byte by byte, `Host` too, which the clients' signatures are of.
"""

import http.client
import random
import socket
import struct
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Literal
from urllib.parse import urlsplit

Fault = Literal["errors", "resets", "stalls", "slow"]

FAULT_SHARE = 0.7  # of the requests; a client that tries again must get through at last
STALL_SECONDS = (1.0, 5.0)
SLOW_BYTES, SLOW_SECONDS = 4096, 0.02  # a piece, and the pause before it: 200 kB/s
UPSTREAM_SECONDS = 60.0
PIECE_BYTES = 64 << 10
_ERRORS = ((500, "InternalError"), (503, "SlowDown"))
_HOP_BY_HOP = {"connection", "keep-alive", "transfer-encoding", "expect"}  # of one connection, not of the request


class S3Proxy:
    """Listens while the block runs; `endpoint` is its URL. `fault` is what it does to requests now."""

    def __init__(self, upstream: str, seed: int) -> None:
        address = urlsplit(upstream)
        assert address.hostname
        assert address.port
        self.upstream = (address.hostname, address.port)
        self.fault: Fault | None = None
        self.hit = 0
        """Requests that met a fault."""
        self._chance = random.Random(seed)
        self._server = _Server(("127.0.0.1", 0), _Handler, self)
        self.endpoint = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> "S3Proxy":
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.1}, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    def draw(self) -> Fault | None:
        """The fault for one more request."""
        fault = self.fault
        if fault is None or self._chance.random() >= FAULT_SHARE:
            return None
        self.hit += 1
        return fault

    def draw_error(self) -> tuple[int, str]:
        return self._chance.choice(_ERRORS)

    def draw_stall(self) -> float:
        return self._chance.uniform(*STALL_SECONDS)

    def draw_late_reset(self) -> bool:
        """Whether the connection breaks after the server has done what was asked."""
        return self._chance.random() < 0.5


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 128

    def __init__(self, address: tuple[str, int], handler: type[BaseHTTPRequestHandler], proxy: S3Proxy) -> None:
        self.proxy = proxy
        super().__init__(address, handler)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Nothing: a connection that broke was broken on purpose, or its client was killed."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Server

    def handle_any(self) -> None:
        proxy = self.server.proxy
        fault = proxy.draw()
        if fault == "errors":
            self._drop_body()
            self._answer_error(*proxy.draw_error())
        elif fault == "resets" and not proxy.draw_late_reset():
            self._reset()
        else:
            if fault == "stalls":
                time.sleep(proxy.draw_stall())
            self._forward(fault)

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = handle_any  # the names that http.server calls

    def log_message(self, format: str, *arguments: Any) -> None:
        pass

    def _body(self) -> Iterator[bytes]:
        left = int(self.headers.get("Content-Length", 0))
        while left and (piece := self.rfile.read(min(left, PIECE_BYTES))):
            left -= len(piece)
            yield piece
        if left:
            raise ConnectionError("the client left in the middle of its request")

    def _drop_body(self) -> None:
        for _ in self._body():
            pass

    def _answer_error(self, status: int, code: str) -> None:
        text = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>injected</Message></Error>".encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/xml")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(text)

    def _reset(self) -> None:
        """End the connection with RST rather than FIN, as a machine does that has lost it."""
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.close_connection = True
        socket.close(self.connection.detach())  # at once: this class would shut it down first, which is a FIN

    def _forward(self, fault: Fault | None) -> None:
        upstream = http.client.HTTPConnection(*self.server.proxy.upstream, timeout=UPSTREAM_SECONDS)
        try:
            upstream.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
            for name, value in self.headers.items():
                if name.lower() not in _HOP_BY_HOP:
                    upstream.putheader(name, value)
            upstream.endheaders()
            for piece in self._body():
                upstream.send(piece)
            self._relay(upstream.getresponse(), fault)
        finally:
            upstream.close()

    def _relay(self, answer: http.client.HTTPResponse, fault: Fault | None) -> None:
        if fault == "resets" and not answer.length:
            return self._reset()  # what was asked is done, and the client does not hear of it
        self.send_response_only(answer.status, answer.reason)
        for name, value in answer.getheaders():
            if name.lower() not in _HOP_BY_HOP:
                self.send_header(name, value)
        if answer.getheader("Content-Length") is None:
            self.send_header("Connection", "close")  # the body's end is the connection's
            self.close_connection = True
        self.end_headers()
        if fault == "resets":
            self.wfile.write(answer.read((answer.length or 0) // 2))
            return self._reset()
        while piece := answer.read(SLOW_BYTES if fault == "slow" else PIECE_BYTES):
            if fault == "slow":
                time.sleep(SLOW_SECONDS)
            self.wfile.write(piece)
        return None
