"""A model factory that takes as long as a test likes: it is building until its process is ended."""

import time
from pathlib import Path

import torch


def never(mark: str) -> torch.nn.Module:
    """Write the file `mark`, and wait."""
    Path(mark).write_text("building")
    while True:
        time.sleep(60)
