"""A peer's own settings: flags over environment over file. The program refuses a wrong value before anything starts."""

from __future__ import annotations

import ipaddress
import math
import re
import sys
from contextlib import suppress
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any, Final, Literal, get_args

from pydantic import Field, field_validator

from node.donor.owner_settings import LiveSettings
from node.earlier_settings import EARLIER, GIVEN, GONE, OPTIONS, TCP_ALONE, of_today
from node.overlay.settings import OverlaySettings, Reachability
from protos import toml_file
from protos.address import parse_address
from protos.disk import at_home, path_problem
from protos.errors import OperatorError, Refusal
from protos.example import Setting, allowed, settings_of
from protos.mistakes import MIRROR, PEER, PEER_ADDRESS, PEER_LISTEN, PEER_LISTEN_OR_ALL
from protos.run_config import Address
from protos.toml_file import OFF, Layers, listed, read_layers

PORT_MAX = 65535
BYTES_A_MBIT = 125_000
LISTEN: Final = "*:0"
VOTE_SIZES: Final = range(2, 2049)
UPLINK_PART_MAX: Final = 10


class PeerSettings(LiveSettings):
    """Settings of `swarmentum join`, which `load_settings` reads."""

    home: Path = Field(default=Path("~/.swarmentum/peer"), validate_default=True)
    """Folder of the peer: its identity, snapshots and momentum."""

    device: str = "auto"
    """What computes: auto (the first of cuda, mps, cpu), or a torch device such as cuda:1. `join` starts a peer for
    each of several: cuda:0,cuda:1."""

    precision: Literal["auto", "bf16", "fp32"] = "auto"
    """Number format of the forward pass. Master weights are fp32 with every choice."""

    micro_batch: int = Field(default=8, ge=1, le=1 << 16)
    """Samples in one forward pass. A smaller value needs less memory, and does not change the gradient."""

    memory: Literal["auto", "full", "small", "host", "stream"] = "auto"
    """What this peer's own state takes. `full`: 28.5 bytes a parameter on a CPU, 18 on a GPU. `small`: 6.5 and 8, and 2 to 3
    more where a step has several micro-batches; votes differ a little, and saving waits for the disk. `host`: bf16 weights on
    the GPU (2), all else in main memory (6.5), where the optimizer runs. `stream`: the weights of two layers at a time on the
    GPU. `auto`: the first of these that fits; host and stream only with CUDA. Other peers notice nothing."""

    activation_checkpointing: bool = False
    """Compute activations again in the backward pass instead of keeping them: less memory, about a third more time. The
    gradient is the same."""

    compile: bool = False
    """Compile the model with torch.compile: faster steps on most GPUs, after a minute at the start."""

    vote_size: int | str | None = Field(default="25%", title="a whole number from 2 to 2,048, or a part such as 25%")
    """Size of this peer's votes. A part: up to five times the bytes of the run's votes, which learns more per step, while they
    reach the slowest peer within this part of this peer's time for computing; fewer bytes over a slow uplink. With
    upload_gb, never more than the run's. `off`: the run's group_size, top_k or one_in, whichever its selection has. A number:
    this, in their place."""

    data: str | None = None
    """Training text or tokens on this machine, instead of those that the run names."""

    listen: str = Field(default=LISTEN, pattern=PEER_LISTEN_OR_ALL)
    """Where other peers reach this one, TCP and UDP. `*` is every address, IPv4 and IPv6. Port 0 takes a free port. With /tcp
    at the end, UDP (QUIC) is off: for a public machine that fears attacks on it (docs/security.md)."""

    bootstrap: list[Address] = Field(default_factory=list)
    """More overlay peers to start from, besides the invite's and the coordinator's."""

    reachability: list[str] = Field(
        default_factory=list, title="public, private, addresses, relays; commas between them"
    )
    """How other peers reach this one. By default this peer asks others to dial it, and takes relays if they cannot. `public`
    and `private` say whether they can. Addresses such as /ip4/203.0.113.5/tcp/4001 are those to dial instead of the found
    ones. Addresses that end in /p2p/ID are relays, one address of each."""

    metrics_listen: str | None = Field(default=None, pattern=PEER_LISTEN)
    """Address and port of Prometheus metrics (http://.../metrics). Off by default."""

    snapshots_kept: int = Field(default=2, ge=2, le=1000)
    """Snapshots that stay on the disk, the newest ones, as far as it has room. `swarmentum-coordinator run fork` can go back to
    these. Anchors store every snapshot, other peers those that the log draws them for."""

    mirror: str | None = Field(default=None, pattern=MIRROR)
    """A place beside the peers for snapshots: a folder, file://, s3:// or hf://. An anchor copies the agreed ones there,
    as many as `snapshots_kept`. Every peer reads there, also from https://, beside the `[snapshots] mirrors` of the run."""

    track: list[Literal["tensorboard", "wandb", "trackio", "otlp"]] = Field(default_factory=list)
    """Also write loss, learning rate, peers and tokens of each step to experiment trackers, which have to be installed.
    `otlp` sends a trace of each step to an OpenTelemetry receiver: OTEL_EXPORTER_OTLP_ENDPOINT, or http://localhost:4318."""

    decline: list[Literal["evaluation", "failures"]] = Field(default_factory=list)
    """What this peer does not do for the run. `evaluation`: report the held-out loss of states that it stores, which takes
    memory for the parameters once more. `failures`: if it cannot join, tell the run's operator why: one word (memory, data,
    ...) and the version, without a name."""

    archive: bool = False
    """Keep the log, every payload and snapshots, for `swarmentum verify`."""

    patience_seconds: float | None = Field(default=None, ge=1, title="seconds")
    """How long this peer waits for a silent coordinator, for a peer that has the model, or for votes that no peer gives. After
    that it gives up. By default it waits for ever: an unattended machine continues when the others are back."""

    allow: list[Literal["code", "data", "requests", "left_out"]] = Field(default_factory=list)
    """What you agree to. Only for operators you trust: `code` (the run calls Python code of this machine; --allow-code) and
    `data` (it uses files that it names; --allow-data). `requests`: ask no questions (--yes). `left_out`: go on although
    more than 1 % of the text on this machine is left out; `swarmentum data survey` lists it."""

    @field_validator("home")
    @classmethod
    def _person(cls, value: Path) -> Path:
        if (why := path_problem(at_home(value))) is not None:
            raise ValueError(why)
        return at_home(value)

    @field_validator("bootstrap", "reachability", "track", "decline", "allow", mode="before")
    @classmethod
    def _parts(cls, value: Any) -> Any:
        return listed(value)

    @field_validator("vote_size", mode="before")
    @classmethod
    def _size(cls, value: Any) -> Any:
        """A whole number, or a text such as 25%."""
        text = str(value).strip()
        if value is None or text.lower() == OFF:
            return None
        with suppress(ValueError):
            if text.endswith("%") and 0 < float(text[:-1]) <= 100 * UPLINK_PART_MAX:
                return text
            if int(text) in VOTE_SIZES:
                return int(text)
        expected = allowed(cls.model_fields["vote_size"], OFF)
        raise ValueError(f"expected is {expected} (given: {value!r})")

    @field_validator("reachability")
    @classmethod
    def _reached(cls, value: list[str]) -> list[str]:
        for word in value:
            if word not in get_args(Reachability) and not re.search(PEER_ADDRESS, word):
                _check_announced(word)
        if {"public", "private"} <= set(value):
            raise ValueError("public and private exclude each other")
        return value

    @field_validator("listen", "metrics_listen")
    @classmethod
    def _address(cls, value: str | None) -> str | None:
        if value is not None:
            host, _, port = value.removesuffix(TCP_ALONE).rpartition(":")
            if host != "*":
                ipaddress.ip_address(host.strip("[]"))
            if int(port) > PORT_MAX:
                raise ValueError(f"{port} is not a port; use a port from 0 to {PORT_MAX}")
        return value

    @property
    def own_size(self) -> int | None:
        """The size of this peer's votes, or at first, if it is not the run's."""
        return self.vote_size if isinstance(self.vote_size, int) else None

    @property
    def uplink_part(self) -> float | None:
        """The part of its time that the votes may take on their way, if their size follows the uplink."""
        return float(self.vote_size[:-1]) / 100 if isinstance(self.vote_size, str) else None

    def overlay(self) -> OverlaySettings:
        """The settings of the overlay."""
        host, _, port = self.listen.removesuffix(TCP_ALONE).rpartition(":")
        words: tuple[Reachability, ...] = ("public", "private")
        relays = [it for it in self.reachability if re.search(PEER_ADDRESS, it)]
        return OverlaySettings(
            listen_host=host.strip("[]"),
            listen_port=int(port),
            announce=tuple(it for it in self.reachability if it not in relays and it.startswith("/")),
            bootstrap=tuple(self.bootstrap),
            relays=tuple(relays),
            reachability=next((it for it in words if it in self.reachability), "auto"),
            relay_bytes_a_second=None if self.relaying_mbit is None else self.relaying_mbit * BYTES_A_MBIT,
            quic=not self.listen.endswith(TCP_ALONE),
            patience_seconds=math.inf if self.patience_seconds is None else self.patience_seconds,
        )


def _check_announced(address: str) -> None:
    """ValueError unless other peers can dial a multiaddress."""
    try:
        parse_address(f"{address}/p2p/{PEER}")
    except Refusal as error:
        wanted = "neither public, private nor a multiaddress such as /ip4/203.0.113.5/tcp/4001"
        raise ValueError(f"{address!r} is {wanted}: {error.detail.rpartition(': ')[2]}") from error


def load_settings(**flags: Any) -> PeerSettings:
    """Settings from flags (None and empty: not given), environment and file. The OperatorError names every wrong value.

    Environment: SWARMENTUM_<NAME>; file: swarmentum.toml, or that which SWARMENTUM_CONFIG names.
    """
    found = read_layers("SWARMENTUM_", "swarmentum.toml", {**PeerSettings.model_fields, **EARLIER, **GONE})
    if not found.named:
        _refuse_consent_of(found)
    given = {name: value for name, value in flags.items() if value is not None and value != []}
    if given.get("home") == "":
        raise OperatorError("home is empty, and would mean the working folder: name a folder, or leave home out")
    layers = ((str(found.path), found.of_file), ("environment", found.of_environment), (GIVEN, given))
    return found.made(PeerSettings, of_today(layers, LISTEN, partial(print, file=sys.stderr)), _helped)


def _helped(wrong: toml_file.Wrong) -> toml_file.Wrong:
    """A mistake with the values that its setting takes, or with the settings that an unknown one is near to."""
    field = PeerSettings.model_fields.get(str(wrong.place[0])) if wrong.place else None
    if field is None:
        return toml_file.hinted(wrong, PeerSettings)
    values = allowed(field, OFF)
    text = re.sub(r"Input should .*(?= \(given: )", lambda _: f"expected is {values}", wrong.text, flags=re.S)
    return replace(wrong, text=text) if values else wrong


@cache
def peer_settings() -> tuple[Setting, ...]:
    """Every setting of a peer, with its default, its values and what it does."""
    return tuple(settings_of(PeerSettings, made=PeerSettings.model_construct(), none=OFF))


def _refuse_consent_of(found: Layers) -> None:
    """Raises OperatorError if a settings file that lies in the working folder agrees to something in the person's place.

    The folder may be somebody else's. Flags, the environment, and a file that SWARMENTUM_CONFIG names are the person's own.
    """
    for name in ("allow", *OPTIONS):
        if name in found.of_file and _agrees(found.of_file[name]):
            line = toml_file.line_of(found.text, (name,))
            raise OperatorError(
                f"{found.path}:{line}: {name}: a file of the working folder cannot agree for you; "
                "remove the line, and use the options --yes, --allow-data and --allow-code, or SWARMENTUM_ALLOW, or name the "
                "file in SWARMENTUM_CONFIG"
            )


def _agrees(value: Any) -> bool:
    """Whether a value of `allow` is more than `left_out`, which agrees to nothing that a run asks for. So is one that is no
    list."""
    try:
        return listed(value) != ["left_out"]
    except ValueError:
        return True
