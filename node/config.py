"""A peer's own settings: flags over environment over file. The program refuses a wrong value before anything starts."""

from __future__ import annotations

import ipaddress
import math
import os
import re
import tomllib
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError, field_validator
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict

from node.donor.owner_settings import LiveSettings
from node.overlay.settings import OverlaySettings
from protos import toml_file
from protos.errors import OperatorError
from protos.limits import PAYLOADS_GB, SNAPSHOTS_GB
from protos.mistakes import LICENCE, NO_LICENCE, PEER_LISTEN, PEER_LISTEN_OR_ALL
from protos.optimizer_config import GroupSize, OneIn, TopK
from protos.run_config import Address

PORT_MAX = 65535
BYTES_A_MBIT = 125_000
CONSENTS = ("allow_code", "allow_data", "yes")
MULTIADDRESS = re.compile(r"/(ip4|ip6|dns|dns4|dns6)/[^/\s]+/(tcp|udp)/\d{1,5}(/[^\s]*)?")


class PeerSettings(LiveSettings, BaseSettings):
    """Settings of `swarmentum join`. Environment: SWARMENTUM_<NAME>; file: swarmentum.toml or $SWARMENTUM_CONFIG."""

    model_config = SettingsConfigDict(
        env_prefix="SWARMENTUM_", extra="forbid", frozen=True, use_attribute_docstrings=True, env_ignore_empty=True
    )

    home: Path = Field(default_factory=lambda: Path.home() / ".swarmentum" / "peer")
    """Folder of the identity, snapshots and this peer's own momentum."""

    device: str = "auto"
    """auto (cuda, then mps, then cpu), or a torch device such as cuda:1."""

    precision: Literal["auto", "bf16", "fp32"] = "auto"
    """Autocast of the forward pass; master weights are fp32 with every choice."""

    micro_batch: int = Field(default=8, ge=1, le=1 << 16)
    """Samples in one forward pass; a smaller value needs less memory, and does not change the gradient."""

    memory: Literal["auto", "full", "small"] = "auto"
    """What this peer's own state takes. `small`: 8 bytes a parameter less on a CPU, 4 on a card, because the second moment is
    kept by rows and columns; steps differ a little. `auto`: small where full does not fit. Other peers notice nothing."""

    activation_checkpointing: bool = False
    """Compute activations again in the backward pass instead of keeping them: less memory, about a third more time. The
    gradient is the same."""

    compile: bool = False
    """Compile the model with torch.compile: faster steps on most GPUs, after a minute at the start."""

    group_size: GroupSize | None = None
    """Coefficients that a vote chooses from: 128 for the slowest uplink, down to 8. By default the run's."""

    top_k: TopK | None = None
    """Components of a chunk of 4096 in a run that selects by top-k; more than 512 need a run with 8-bit values. By default the
    run's."""

    one_in: OneIn | None = None
    """One coefficient in so many has a vote of this peer, in a run with random, striding or slicing. By default the run's."""

    fit_uplink: bool = False
    """Let the size of the votes follow the measured uplink, starting from the size above. Larger votes learn more per step."""

    uplink_budget: float = Field(default=0.25, gt=0, le=10)
    """With fit_uplink: the time that the votes may take to a typical peer, as a part of this peer's time for computing."""

    data: str | None = None
    """Path of the training text or tokens on this machine, instead of the run's `data.source`."""

    listen: str = Field(default="*:0", pattern=PEER_LISTEN_OR_ALL)
    """IP address and port (TCP and UDP) of the overlay; `*` is every address, IPv4 and IPv6. Port 0 takes a free port."""

    announce: list[str] = Field(default_factory=list)
    """Multiaddresses to give other peers instead of the found ones, e.g. /ip4/203.0.113.5/tcp/4001."""

    bootstrap: list[Address] = Field(default_factory=list)
    """More overlay peers to start from, besides the invite's and the coordinator's."""

    relays: list[Address] = Field(default_factory=list)
    """Relays through which other peers reach this peer behind a router; one address of each."""

    reachability: Literal["auto", "public", "private"] = "auto"
    """Whether other peers can dial this peer. With auto, this peer asks others to dial it, and takes relays if they cannot."""

    relay_for_others: bool = True
    """If others can dial this peer, carry connections between peers that nobody can dial. Turn it off on a metered link."""

    quic: bool = True
    """Listen on UDP (QUIC) beside TCP. Turn it off on a public machine that fears attacks on QUIC (docs/security.md)."""

    metrics_listen: str | None = Field(default=None, pattern=PEER_LISTEN)
    """Address and port of Prometheus metrics (http://.../metrics); off by default."""

    data_gb: float = Field(default=10.0, gt=0)
    """Room on the disk for training text of a run that has it on the web. The shards of the next steps always stay."""

    snapshots_gb: float = Field(default=SNAPSHOTS_GB, gt=0)
    """Room for snapshots on the disk, at least two. If three do not fit, the older one goes before a new one is there."""

    payloads_gb: float = Field(default=PAYLOADS_GB, gt=0)
    """Room on the disk for other peers' votes since the last snapshot but one. Joiners need them; the oldest go first."""

    snapshots_kept: int = Field(default=2, ge=2, le=1000)
    """Snapshots that stay on the disk, the newest ones, within `snapshots_gb`. `swarmentum-coordinator run fork` can go back to
    these. Anchors store every snapshot, other peers those that the log draws them for."""

    track: Literal["tensorboard", "wandb", "trackio"] | None = None
    """Also write loss, learning rate, peers and tokens of each step to this experiment tracker, which has to be installed."""

    trace: bool = False
    """Send a trace of each step to an OpenTelemetry receiver: OTEL_EXPORTER_OTLP_ENDPOINT, by default http://localhost:4318."""

    tell_failures: bool = True
    """If this peer cannot join, tell the run's operator why: one word (memory, data, ...) and the version, without a name."""

    evaluate: bool = True
    """Report the held-out loss of the states that this peer stores, if the run asks for it: as an anchor, or, in a run without
    anchors, as a peer that the log draws to store the state. It takes memory for the parameters once more."""

    archive: bool = False
    """Keep the log, every payload and snapshots, so that `swarmentum verify` can replay the run from this machine."""

    archive_gb: float = Field(default=20.0, gt=0)
    """Room for the archive on the disk; the oldest part goes first."""

    licence: str = Field(default=NO_LICENCE, pattern=LICENCE)
    """The licence that the card of an export names, as the Hugging Face hub spells it."""

    patience_seconds: float | None = Field(default=None, ge=1)
    """How long this peer waits for a silent coordinator, for a peer that has the model, or for votes that no peer gives. After
    that it gives up. By default it waits for ever: an unattended machine continues when the others are back."""

    allow_code: bool = False
    """Let the run name a Python function of this machine (`model.factory`) and call it."""

    allow_left_out: bool = False
    """Train although more than 1 % of the text on this machine is left out (`swarmentum data survey` lists it)."""

    allow_data: bool = False
    """Let the run name files of this machine (`data.source`, a tokenizer's folder) and read them."""

    yes: bool = False
    """Agree to the run's requests of this machine without a question."""

    @field_validator("announce")
    @classmethod
    def _multiaddresses(cls, value: list[str]) -> list[str]:
        for address in value:
            if not MULTIADDRESS.fullmatch(address):
                raise ValueError(f"{address!r} is not a multiaddress such as /ip4/203.0.113.5/tcp/4001")
            _, protocol, host, _, port, *_ = address.split("/")
            try:
                if protocol in ("ip4", "ip6"):
                    ipaddress.ip_address(host)
            except ValueError as error:
                raise ValueError(f"{address!r}: {error}") from error
            if not 0 < int(port) <= PORT_MAX:
                raise ValueError(f"{address!r}: other peers cannot dial port {port}; use a port from 1 to {PORT_MAX}")
        return value

    @field_validator("listen", "metrics_listen")
    @classmethod
    def _address(cls, value: str | None) -> str | None:
        if value is not None:
            host, _, port = value.rpartition(":")
            if host != "*":
                ipaddress.ip_address(host.strip("[]"))
            if int(port) > PORT_MAX:
                raise ValueError(f"{port} is not a port; use a port from 0 to {PORT_MAX}")
        return value

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Flags, then environment, then the file."""
        path = Path(os.environ.get("SWARMENTUM_CONFIG", "swarmentum.toml"))
        return init_settings, env_settings, toml_file.TomlSettings(settings_cls, toml_file=path)

    def overlay(self) -> OverlaySettings:
        """The settings of the overlay."""
        host, _, port = self.listen.rpartition(":")
        return OverlaySettings(
            listen_host=host.strip("[]"),
            listen_port=int(port),
            announce=tuple(self.announce),
            bootstrap=tuple(self.bootstrap),
            relays=tuple(self.relays),
            reachability=self.reachability,
            relay_for_others=self.relay_for_others,
            relay_bytes_a_second=None if self.relaying_mbit is None else self.relaying_mbit * BYTES_A_MBIT,
            memory_bytes_max=None if self.overlay_memory_gb is None else int(self.overlay_memory_gb * 10**9),
            quic=self.quic,
            patience_seconds=math.inf if self.patience_seconds is None else self.patience_seconds,
        )


def load_settings(**flags: Any) -> PeerSettings:
    """Settings from flags (None and empty: not given), environment and file. The OperatorError names every wrong value."""
    path = Path(os.environ.get("SWARMENTUM_CONFIG", "swarmentum.toml"))
    if "SWARMENTUM_CONFIG" in os.environ and not path.is_file():
        raise OperatorError(f"SWARMENTUM_CONFIG={path}: no such file; correct the path, or unset the variable")
    given = {name: value for name, value in flags.items() if value is not None and value != []}
    try:
        if "SWARMENTUM_CONFIG" not in os.environ and path.is_file():
            _refuse_consent_of(path)
        return PeerSettings(**given)
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise OperatorError(f"{path} is not TOML: {error}; correct the file, or move it away") from error
    except OSError as error:
        raise OperatorError(f"{path} cannot be read: {error.strerror}; move it away, or make it readable") from error
    except ValidationError as error:
        text = path.read_text(encoding=toml_file.WRITTEN) if path.is_file() else ""
        lines = toml_file.describe(
            error, lambda loc: f"{path}:{toml_file.line_of(text, loc)}: " if _in(text, loc) else ""
        )
        raise OperatorError(f"wrong settings:\n{lines}") from error


def _refuse_consent_of(path: Path) -> None:
    """Raises OperatorError if a settings file that lies in the working folder agrees to something in the person's place.

    The folder may be somebody else's. Flags, the environment, and a file that SWARMENTUM_CONFIG names are the person's own.
    """
    text = path.read_text(encoding=toml_file.WRITTEN)
    for name in CONSENTS:
        if name in tomllib.loads(text):
            flag = "--" + name.replace("_", "-")
            raise OperatorError(
                f"{path}:{toml_file.line_of(text, (name,))}: {name}: a file of the working folder cannot agree for you; "
                f"remove the line, and use {flag} or SWARMENTUM_{name.upper()}, or name the file in SWARMENTUM_CONFIG"
            )


def _in(text: str, loc: tuple[int | str, ...]) -> bool:
    return any(line.split("=")[0].strip() == str(loc[0]) for line in text.splitlines()) if loc else False
