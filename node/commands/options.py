"""Options that several commands of `swarmentum` share, and the exit codes that each command prints in its help."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from protos.errors import OperatorError

EXIT_CODES = (
    "Exit codes: 0 done, 1 failed (demo: digests differ or the loss did not fall; verify: a step does not hold; "
    "doctor: this machine cannot take part), 2 wrong use or configuration, "
    "3 unreachable, 4 refused, 5 replicas differ, 130 interrupted (left cleanly)."
)
InviteLink = Annotated[
    str, typer.Argument(metavar="INVITE", help="The run's invite link, swarmentum://..., or - to read it from stdin.")
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON for programs; logs go to stderr.")]
Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="Print more log lines.")]
Listen = Annotated[
    str | None, typer.Option(help="IP:port of the overlay, TCP and UDP (default: *:0, every address and a free port).")
]
Announce = Annotated[
    list[str] | None,
    typer.Option(help="Multiaddress that other peers should dial, e.g. /ip4/203.0.113.5/tcp/4001; repeatable."),
]
Bootstrap = Annotated[list[str] | None, typer.Option(help="Multiaddress of an overlay peer to start from; repeatable.")]
Reachability = Annotated[str | None, typer.Option(help="auto, public (dialled directly) or private (behind a router).")]


MaybeInvite = Annotated[
    str | None,
    typer.Argument(
        metavar="[INVITE]", help="A run's invite link, or - to read it from stdin; without it, the machine alone."
    ),
]
Home = Annotated[Path | None, typer.Option(help="Folder of the peer (default: ~/.swarmentum/peer).")]
Device = Annotated[
    str | None, typer.Option(help="auto (the first of cuda, mps, cpu) or a torch device such as cuda:1.")
]
MicroBatch = Annotated[
    int | None, typer.Option(help="Samples in one forward pass (default: 8). A smaller value needs less memory.")
]
Checkpointing = Annotated[
    bool,
    typer.Option("--activation-checkpointing", help="Use less memory for activations; a step takes a third more time."),
]
InviteOrStdin = Annotated[
    str | None, typer.Argument(metavar="INVITE", help="The run's invite link, or - to read it from stdin.")
]
InviteFile = Annotated[
    Path | None,
    typer.Option(help="A file with the link. All users of a machine can see a link on the command line."),
]
Threads = Annotated[int | None, typer.Option(help="CPU threads that the peer uses (default: PyTorch's choice).")]
Nice = Annotated[
    int | None,
    typer.Option(
        help="How far the peer steps back behind other programs: 0 (as they are) to 19 (they all come first)."
    ),
]
Hours = Annotated[
    str | None,
    typer.Option(help="When the peer works, in local time: 'mon-fri 18:00-08:00, sat-sun' (default: always)."),
]
OnlyOnMains = Annotated[bool, typer.Option("--only-on-mains", help="Pause while a battery feeds the machine.")]
OnlyWhenIdle = Annotated[
    float | None, typer.Option(help="Work only after nobody has used keyboard and mouse for so many seconds.")
]
NotBeside = Annotated[
    bool,
    typer.Option(
        "--not-beside-other-gpu-programs",
        help="Pause while another program computes on the GPU, or a game draws on it.",
    ),
]
DutyCycle = Annotated[
    float | None, typer.Option(help="The part of the time that the device computes, 0.05 to 1 (default: 1).")
]
GpuMemory = Annotated[
    float | None, typer.Option(help="The part of the GPU's memory that the peer takes at most, 0.05 to 1 (CUDA).")
]
DiskGb = Annotated[
    float | None, typer.Option(help="Archive, others' votes and text from the web together, in GB (default: no limit).")
]
KeepAwake = Annotated[
    bool, typer.Option("--keep-awake", help="Keep the machine from automatic sleep while the peer works.")
]
UploadMbit = Annotated[float | None, typer.Option(help="The fastest upload, in Mbit/s (default: no limit).")]
DownloadMbit = Annotated[float | None, typer.Option(help="The fastest download, in Mbit/s (default: no limit).")]
RelayMbit = Annotated[
    float | None, typer.Option(help="What this peer carries between others on average, in Mbit/s; 0: nothing.")
]
UploadGb = Annotated[float | None, typer.Option(help="Upload of a calendar month, in GB (default: no limit).")]
DownloadGb = Annotated[float | None, typer.Option(help="Download of a calendar month, in GB (default: no limit).")]
Owner = Annotated[
    str | None, typer.Option(help="Your name, as everybody sees it; several machines of one name are shown together.")
]
Relays = Annotated[
    list[str] | None,
    typer.Option("--relay", help="Multiaddress of a relay through which other peers reach this one; repeatable."),
]
Metrics = Annotated[str | None, typer.Option(help="IP:port of Prometheus metrics (default: off).")]
Track = Annotated[
    str | None, typer.Option(help="Also write the steps to an experiment tracker: tensorboard, wandb or trackio.")
]
Trace = Annotated[
    bool,
    typer.Option(
        "--trace", help="Send a trace of each step by OTLP to OTEL_EXPORTER_OTLP_ENDPOINT (default: localhost)."
    ),
]
Archive = Annotated[bool, typer.Option("--archive", help="Keep the log and every payload, for `swarmentum verify`.")]
AllowCode = Annotated[
    bool,
    typer.Option(
        "--allow-code",
        help="Allow the run to call Python code of this machine, installed or in the working folder (`model.factory`). "
        "Use it only for operators you trust.",
    ),
]
AllowData = Annotated[
    bool,
    typer.Option(
        "--allow-data",
        help="Allow the run to name files of this machine (data, tokenizer) and to use them. "
        "Use it only for operators you trust.",
    ),
]
Data = Annotated[str | None, typer.Option(help="Training text or tokens on this machine (default: what the run says).")]
AllowLeftOut = Annotated[
    bool,
    typer.Option(
        "--allow-left-out", help="Go on although more than 1 % of the text is left out; the command lists it."
    ),
]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Agree to the run's requests without a question.")]


def need_node_extra() -> None:
    """OperatorError with the install command if torch is missing: the base install serves a coordinator only."""
    missing = [
        name for name in ("torch", "hivemind", "transformers", "safetensors", "zstandard") if find_spec(name) is None
    ]
    if missing:
        raise OperatorError(
            f"this command needs {', '.join(missing)}: pip install '.[node]' in the folder of the repository"
        )
