"""Generate the Python code of `protos/v1/*.proto`, or check that the committed code is what the .proto files say.

python -m tests.house.generate_protos           write protos/v1/*_pb2*.py and .pyi
python -m tests.house.generate_protos --check   exit 1 and name the files that differ
"""

from __future__ import annotations

import re
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
EXPERIMENTAL = re.compile(r"\n\n # This class is part of an EXPERIMENTAL API\.\nclass .*?(?=\n\n\n|\Z)", re.S)
"""Calls without a channel, a class for each service: nobody here makes any, and they are half of the file."""


def generate(out: Path) -> None:
    """Write the generated modules below `out` (out/protos/v1/...)."""
    from grpc_tools import protoc  # type: ignore[import-untyped]

    sources = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "protos/v1").glob("*.proto"))
    flags = [f"--proto_path={ROOT}", f"--python_out={out}", f"--pyi_out={out}"]
    if protoc.main(["protoc", *flags, *sources]):
        raise SystemExit("protoc failed; its messages are above")
    if protoc.main(["protoc", f"--proto_path={ROOT}", f"--grpc_python_out={out}", "protos/v1/coordinator.proto"]):
        raise SystemExit("protoc failed; its messages are above")
    calls = out / "protos/v1/coordinator_pb2_grpc.py"
    calls.write_text(EXPERIMENTAL.sub("", calls.read_text()).rstrip() + "\n")


def drift() -> list[str]:
    """Names of generated files that are missing, stale or left over."""
    with tempfile.TemporaryDirectory() as folder:
        generate(Path(folder))
        fresh = {path.name: path.read_bytes() for path in (Path(folder) / "protos/v1").iterdir()}
    committed = {path.name: path.read_bytes() for path in (ROOT / "protos/v1").glob("*_pb2*")}
    return sorted(name for name in fresh.keys() | committed.keys() if fresh.get(name) != committed.get(name))


def main() -> None:
    if "--check" not in sys.argv[1:]:
        generate(ROOT)
        return
    stale = drift()
    if stale:
        raise SystemExit(f"generated code differs from the .proto files: {', '.join(stale)}; run `make protos`")


if __name__ == "__main__":
    main()
