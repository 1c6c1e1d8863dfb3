"""A peer whose device is markup and escape codes: it reached terminals, and crashed `status`."""

import asyncio
import subprocess
import sys

from tests.attack.base import Target
from tests.attack.joining import follow_until_cut, joined

DEVICES = ("[/]", "[/x]", "\x1b]0;owned\x07", "[link=http://x]y[/link]", "\x1b]52;c;b3duZWQ=\x07", "\u202eupc")


class MarkupDevice:
    name = "markup_device"
    what = "joins with devices that are markup or escape codes, and runs `swarmentum status` as everybody else would"

    def run(self, target: Target, seconds: float) -> str:
        return asyncio.run(_join(target, seconds))


async def _join(target: Target, seconds: float) -> str:
    failed, escaped = [], []
    for device in DEVICES:
        async with joined(target, device=device) as (client, _):
            task = asyncio.ensure_future(follow_until_cut(client))
            try:
                command = (sys.executable, "-m", "node", "status", target.link)
                done = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, check=False)
            finally:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
            if done.returncode:
                failed.append(device)
            if any(mark in done.stdout for mark in ("\x1b]", "\x07", "\u202e")):
                escaped.append(device)
    return f"`status` failed for {failed or 'none'}; codes reached the terminal for {escaped or 'none'}"


ATTACK = MarkupDevice()
