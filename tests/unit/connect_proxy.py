"""A small HTTP proxy for tests: it answers CONNECT, and leads each name and port to a port of this machine."""

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

SECONDS_MAX = 240.0


class ConnectProxy:
    """`asked`: the heads of all requests. `leads`: the port here that a place leads to; any other one is refused. While it is
    `silent`, it answers nothing."""

    def __init__(self, leads: dict[str, int]) -> None:
        self.leads, self.asked = leads, list[str]()
        self.silent, self._held = False, list[socket.socket]()
        self._server = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._server.getsockname()[1])
        threading.Thread(target=self._serve, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def _serve(self) -> None:
        with suppress(OSError):
            while True:
                near, _ = self._server.accept()
                if self.silent:
                    self._held.append(near)
                    continue
                threading.Thread(target=self._answer, args=(near,), daemon=True).start()

    def _answer(self, near: socket.socket) -> None:
        near.settimeout(SECONDS_MAX)
        with near, suppress(OSError):
            head = b""
            while not head.endswith(b"\r\n\r\n"):
                head += near.recv(1)
            self.asked.append(head.decode())
            port = self.leads.get(head.split(b" ")[1].decode())
            if port is None:
                near.sendall(b"HTTP/1.0 403 Forbidden\r\nServer: test\r\n\r\n<p>no</p>")
                return
            with socket.create_connection(("127.0.0.1", port), SECONDS_MAX) as far:
                # What the other side says first comes in one piece with the answer.
                far.settimeout(0.2)
                first = b""
                with suppress(TimeoutError):
                    first = far.recv(1 << 16)
                far.settimeout(SECONDS_MAX)
                near.sendall(b"HTTP/1.1 200 Connection established\r\nVia: test\r\n\r\n" + first)
                back = threading.Thread(target=_copy, args=(far, near), daemon=True)
                back.start()
                _copy(near, far)
                back.join(SECONDS_MAX)

    def close(self) -> None:
        with suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)
        for held in (self._server, *self._held):
            held.close()


def _copy(source: socket.socket, target: socket.socket) -> None:
    with suppress(OSError):
        while data := source.recv(1 << 16):
            target.sendall(data)
        target.shutdown(socket.SHUT_WR)


@contextmanager
def connect_proxy(**leads: int) -> Iterator[ConnectProxy]:
    """`leads` may be filled later."""
    proxy = ConnectProxy(leads)
    try:
        yield proxy
    finally:
        proxy.close()


@contextmanager
def speaks_first(words: bytes) -> Iterator[int]:
    """A server that says something before it is asked, then says back what it hears; its port."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            with suppress(OSError):
                while True:
                    stream, _ = server.accept()
                    threading.Thread(target=answer, args=(stream,), daemon=True).start()

        def answer(stream: socket.socket) -> None:
            stream.settimeout(SECONDS_MAX)
            with stream, suppress(OSError):
                stream.sendall(words)
                while data := stream.recv(1 << 16):
                    stream.sendall(data)

        threading.Thread(target=serve, daemon=True).start()
        yield int(server.getsockname()[1])
        with suppress(OSError):
            server.shutdown(socket.SHUT_RDWR)
