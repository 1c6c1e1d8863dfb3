"""The web page under many readers, and its pictures for the docs. A page has to run: `swarmentum web INVITE`.

python -m tests.bench.web readers http://127.0.0.1:7780/ PID    # memory of 1,000 idle readers
python -m tests.bench.web pictures http://127.0.0.1:7780/ docs  # docs/web.png, docs/web-phone.png
"""

from __future__ import annotations

import asyncio
import json
import resource
import sys
import urllib.request
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

READERS: Final = 1000
SETTLE_SECONDS: Final = 3.0
PICTURES: Final = {"web.png": (1000, 1150), "web-phone.png": (360, 740)}


def rss_mb(pid: int) -> float:
    """Resident memory of a process, in MB."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) / 1000
    raise SystemExit(f"process {pid} has no VmRSS: it has ended")


async def readers(url: str, pid: int) -> dict[str, float]:
    """Open READERS live streams, wait until each has its answer, and compare the memory of the process."""
    with await asyncio.to_thread(urllib.request.urlopen, url + "api/runs", timeout=10) as answer:
        run = json.loads(answer.read())["runs"][0]["run"]
    at, before = urlsplit(url), rss_mb(pid)
    head = f"GET /api/runs/{run}/events HTTP/1.1\r\nHost: {at.netloc}\r\n\r\n".encode()
    opened = []
    for _ in range(READERS):
        reader, writer = await asyncio.open_connection(at.hostname, at.port)
        writer.write(head)
        status = await asyncio.wait_for(reader.readline(), 30)
        assert b" 200 " in status, status
        opened.append((reader, writer))

    async def drain(reader: asyncio.StreamReader) -> None:
        while await reader.read(1 << 16):
            pass

    draining = [asyncio.ensure_future(drain(reader)) for reader, _ in opened]
    await asyncio.sleep(SETTLE_SECONDS)
    after = rss_mb(pid)
    for _, writer in opened:
        writer.close()
    await asyncio.gather(*draining, return_exceptions=True)
    return {
        "readers": READERS,
        "mb_before": round(before, 1),
        "mb_after": round(after, 1),
        "mb": round(after - before, 1),
    }


def pictures(url: str, folder: Path) -> None:
    """Pictures of the page once its browser has verified the log."""
    from tests.system.browser import chromium, tab

    with chromium() as browser:
        for name, (width, height) in PICTURES.items():
            with tab(browser, url, width=width, height=height) as page:
                page.wait_for_selector("#proof[data-state=good]")
                page.wait_for_timeout(1000 * SETTLE_SECONDS)
                page.screenshot(path=str(folder / name))
                print(folder / name)


def main() -> None:
    """The command line."""
    match sys.argv[1:]:
        case ["readers", url, pid]:
            most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
            print(json.dumps(asyncio.run(readers(url, int(pid)))))
        case ["pictures", url, folder]:
            pictures(url, Path(folder))
        case _:
            raise SystemExit(__doc__)


if __name__ == "__main__":
    main()
