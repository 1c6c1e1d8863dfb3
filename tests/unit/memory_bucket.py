"""fsspec's own file system in memory, in place of a bucket: a new and empty one each time."""

from typing import Any, ClassVar

import pytest


def memory_bucket() -> str:
    """The address of the bucket. Skips without fsspec."""
    fsspec = pytest.importorskip("fsspec")
    from fsspec.implementations.memory import MemoryFileSystem

    class Memory(MemoryFileSystem):
        protocol = "s3"
        store: ClassVar[dict[str, Any]] = {}

    fsspec.register_implementation("s3", Memory, clobber=True)
    return "s3://bucket/states"
