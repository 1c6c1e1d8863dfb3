"""The definition of a run, from an archive's own files. Refuses files that contradict each other."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from node.archive import files
from node.optim.layout import Layout
from protos.end import End, open_end
from protos.envelope import parse
from protos.errors import OperatorError, Reason, Refusal
from protos.limits import END_BYTES_MAX, ENVELOPE_OVERHEAD_BYTES_MAX
from protos.log import run_id_of
from protos.run_config import RunConfig, config_from_json
from protos.start import StartingState, start_of
from protos.v1 import log_pb2
from protos.version import own_misfit


@dataclass(frozen=True)
class Genesis:
    """The definition of a run, from an archive's own files."""

    run_id: bytes
    config: RunConfig
    coordinator: bytes
    layout: Layout
    start: StartingState | None = None
    end: End | None = None
    layout_named: bool = False
    """Whether the genesis itself names the layout. `layout` is then that one."""

    @classmethod
    def read(cls, folder: Path) -> Genesis:
        """Read it from the archive `folder`.

        Raises Refusal for files that hold no genesis, OperatorError for a run of a format that this program does not speak.
        """
        genesis = parse(log_pb2.Genesis, (folder / files.GENESIS).read_bytes())
        layout = Layout.of_shapes(*files.layout_shapes((folder / files.LAYOUT).read_text()))
        if why := own_misfit(genesis):
            raise OperatorError(why)
        config = config_from_json(genesis.config_json)
        run_id, coordinator = run_id_of(genesis), genesis.coordinator_public_key
        named = genesis.layout_digest
        if named and named != layout.digest():
            raise Refusal(
                Reason.WRONG_LAYOUT,
                f"{files.LAYOUT} is layout {layout.digest().hex()[:16]}; the genesis names {named.hex()[:16]}",
            )
        end = _end_of(folder, run_id, coordinator)
        return cls(run_id, config, coordinator, layout, start_of(genesis), end, bool(named))


def _end_of(folder: Path, run_id: bytes, coordinator: bytes) -> End | None:
    """The signed end of the run, if the archive has one. Raises Refusal for one that the coordinator did not sign."""
    path, most = folder / files.END, END_BYTES_MAX + ENVELOPE_OVERHEAD_BYTES_MAX
    if not path.is_file():
        return None
    with path.open("rb") as file:
        return open_end(file.read(most + 1), run_id=run_id, coordinator=coordinator)
