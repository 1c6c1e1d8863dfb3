"""Web servers of one folder: any host of files; and one that knows byte ranges, as nginx does, and that can lie, end early or
know no ranges."""

import http.server
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any


class Quiet:
    """A handler without a line for each request."""

    def log_message(self, *_: Any) -> None:
        pass


class Files(Quiet, http.server.SimpleHTTPRequestHandler):
    """Of a folder."""


@contextmanager
def serving(handler: Callable[..., Any]) -> Iterator[str]:
    """A server on this machine with this handler; its address, which ends with a slash."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def files_of(folder: Path) -> AbstractContextManager[str]:
    """Any host of files."""
    return serving(partial(Files, directory=str(folder)))


class WebServer:
    """Answers each GET with `answer`, on a thread."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, str | None]] = []
        outer = self

        class Handler(Quiet, http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                outer.answer(self)

        self.http = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_port}"
        threading.Thread(target=self.http.serve_forever, args=(0.02,), daemon=True).start()

    def answer(self, request: http.server.BaseHTTPRequestHandler) -> None:
        raise NotImplementedError


class WebFolder(WebServer):
    """`lies`: bytes of a state that are wrong, by their place. `ends_at`: no file has more bytes."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder, self.lies, self.ends_at, self.ranges = folder, set[int](), 1 << 60, True

    def answer(self, request: http.server.BaseHTTPRequestHandler) -> None:
        wanted = request.headers.get("Range")
        self.asked.append((request.path, wanted))
        path = self.folder / request.path.lstrip("/")
        if not path.is_file():
            request.send_error(404)
            return
        data = bytearray(path.read_bytes()[: self.ends_at])
        for place in self.lies if path.suffix == ".state" or path.name == "payloads" else ():
            data[place] ^= 1
        first, last = 0, len(data) - 1
        if wanted and self.ranges:
            match = re.fullmatch(r"bytes=(\d+)-(\d*)", wanted)
            assert match is not None, wanted
            first, last = int(match[1]), min(int(match[2] or last), last)
            if first > last:
                request.send_error(416)
                return
        part = bytes(data[first : last + 1])
        request.send_response(206 if wanted and self.ranges else 200)
        request.send_header("Content-Length", str(len(part)))
        request.end_headers()
        request.wfile.write(part)

    def close(self) -> None:
        self.http.shutdown()
        self.http.server_close()
