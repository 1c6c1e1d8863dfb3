"""A peer's own settings: flags over environment over file. The program refuses a wrong value before anything starts."""

from __future__ import annotations

import ipaddress
import math
import os
import re
import sys
import tomllib
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, Final, Literal

from pydantic import Field, ValidationError, field_validator
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict

from node.donor.disk_shares import ARCHIVE_GB, TEXT_GB
from node.donor.owner_settings import OFF, LiveSettings
from node.overlay.settings import OverlaySettings
from protos import toml_file
from protos.errors import OperatorError
from protos.example import Setting, allowed, settings_of
from protos.limits import PAYLOADS_GB, SNAPSHOTS_GB
from protos.mistakes import LICENCE, MIRROR, NO_LICENCE, PEER_LISTEN, PEER_LISTEN_OR_ALL
from protos.run_config import Address

PORT_MAX = 65535
BYTES_A_MBIT = 125_000
UPLINK_PART = 0.25
CONSENTS = ("allow_code", "allow_data", "yes")
MULTIADDRESS = re.compile(r"/(ip4|ip6|dns|dns4|dns6)/[^/\s]+/(tcp|udp)/\d{1,5}(/[^\s]*)?")


class PeerSettings(LiveSettings, BaseSettings):
    """Settings of `swarmentum join`. Environment: SWARMENTUM_<NAME>; file: swarmentum.toml or $SWARMENTUM_CONFIG."""

    model_config = SettingsConfigDict(
        env_prefix="SWARMENTUM_", extra="forbid", frozen=True, use_attribute_docstrings=True, env_ignore_empty=True
    )

    home: Path = Field(default_factory=lambda: Path.home() / ".swarmentum" / "peer")
    """Folder of the peer: its identity, snapshots and momentum."""

    device: str = "auto"
    """What computes: auto (the first of cuda, mps, cpu), or a torch device such as cuda:1. `join` starts a peer for
    each of several: cuda:0,cuda:1."""

    precision: Literal["auto", "bf16", "fp32"] = "auto"
    """Number format of the forward pass. Master weights are fp32 with every choice."""

    micro_batch: int = Field(default=8, ge=1, le=1 << 16)
    """Samples in one forward pass. A smaller value needs less memory, and does not change the gradient."""

    memory: Literal["auto", "full", "small", "host"] = "auto"
    """What this peer's own state takes. `full`: 28 bytes a parameter on a CPU, 16 on a card. `small`: 6.5 and 6, and 2 to 3
    more where a step has several micro-batches; votes differ a little, and saving waits for the disk. `host`: bf16 weights on
    the card (2), all else in main memory (6.5), where the optimizer runs. `auto`: the first of these that fits; host only with
    CUDA. Other peers notice nothing."""

    activation_checkpointing: bool = False
    """Compute activations again in the backward pass instead of keeping them: less memory, about a third more time. The
    gradient is the same."""

    compile: bool = False
    """Compile the model with torch.compile: faster steps on most GPUs, after a minute at the start."""

    vote_size: int | None = Field(default=None, ge=2, le=2048)
    """Size of this peer's votes, in place of the run's group_size, top_k or one_in, whichever its selection has. In groups, 128
    is for the slowest uplink, 8 sends 8 times as much and learns more per step."""

    fit_uplink: float | None = Field(default=None, gt=0, le=10, title="true, or a part")
    """Let the size of the votes follow the measured uplink. The votes may take this part of this peer's time for computing on
    their way to a typical peer; `true` is 0.25. Larger votes learn more per step."""

    data: str | None = None
    """Training text or tokens on this machine, instead of those that the run names."""

    listen: str = Field(default="*:0", pattern=PEER_LISTEN_OR_ALL)
    """Where other peers reach this one, TCP and UDP. `*` is every address, IPv4 and IPv6. Port 0 takes a free port."""

    announce: list[str] = Field(default_factory=list)
    """Multiaddresses that other peers should dial instead of the found ones, such as /ip4/203.0.113.5/tcp/4001."""

    bootstrap: list[Address] = Field(default_factory=list)
    """More overlay peers to start from, besides the invite's and the coordinator's."""

    relays: list[Address] = Field(default_factory=list)
    """Relays through which other peers reach this peer behind a router; one address of each."""

    reachability: Literal["auto", "public", "private"] = "auto"
    """Whether other peers can dial this peer. With auto, this peer asks others to dial it, and takes relays if they cannot."""

    quic: bool = True
    """Listen on UDP (QUIC) beside TCP. Turn it off on a public machine that fears attacks on QUIC (docs/security.md)."""

    metrics_listen: str | None = Field(default=None, pattern=PEER_LISTEN)
    """Address and port of Prometheus metrics (http://.../metrics). Off by default."""

    snapshots_gb: float = Field(default=SNAPSHOTS_GB, gt=0, title="GB")
    """Room for snapshots on the disk, at least two. If three do not fit, the older one goes before a new one is there."""

    snapshots_kept: int = Field(default=2, ge=2, le=1000)
    """Snapshots that stay on the disk, the newest ones, within `snapshots_gb`. `swarmentum-coordinator run fork` can go back to
    these. Anchors store every snapshot, other peers those that the log draws them for."""

    mirror: str | None = Field(default=None, pattern=MIRROR)
    """A place beside the peers for snapshots: a folder, file://, s3:// or hf://. An anchor copies the agreed ones there,
    as many as `snapshots_kept`. Every peer reads there, also from https://, beside the `[snapshots] mirrors` of the run."""

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
    """Keep the log, every payload and snapshots, for `swarmentum verify`."""

    licence: str = Field(default=NO_LICENCE, pattern=LICENCE)
    """The licence that the card of an export names, as the Hugging Face hub spells it."""

    patience_seconds: float | None = Field(default=None, ge=1, title="seconds")
    """How long this peer waits for a silent coordinator, for a peer that has the model, or for votes that no peer gives. After
    that it gives up. By default it waits for ever: an unattended machine continues when the others are back."""

    allow_code: bool = False
    """Allow the run to call Python code of this machine, installed or in the working folder: only for operators you trust."""

    allow_left_out: bool = False
    """Go on although more than 1 % of the text on this machine is left out. `swarmentum data survey` lists it."""

    allow_data: bool = False
    """Allow the run to name files of this machine (data, tokenizer) and to use them: only for operators you trust."""

    yes: bool = False
    """Agree to the run's requests without a question."""

    @field_validator("home")
    @classmethod
    def _person(cls, value: Path) -> Path:
        return value.expanduser()

    @field_validator("fit_uplink", mode="before")
    @classmethod
    def _usual(cls, value: Any) -> Any:
        """A person who knows no part says true."""
        return {"true": UPLINK_PART, "false": None}.get(str(value).strip().lower(), value)

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
        return init_settings, env_settings, _File(settings_cls, toml_file=path)

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
            relay_bytes_a_second=None if self.relaying_mbit is None else self.relaying_mbit * BYTES_A_MBIT,
            memory_bytes_max=None if self.overlay_memory_gb is None else int(self.overlay_memory_gb * 10**9),
            quic=self.quic,
            patience_seconds=math.inf if self.patience_seconds is None else self.patience_seconds,
        )


EARLIER: Final[Mapping[str, str]] = {
    "group_size": "vote_size",
    "top_k": "vote_size",
    "one_in": "vote_size",
    "uplink_budget": "fit_uplink",
    "relay_for_others": "relay_mbit",
    "archive_gb": "disk_gb",
    "payloads_gb": "disk_gb",
    "data_gb": "disk_gb",
}
"""Settings of earlier versions, and the one that takes their place."""
PARTS_GB: Final = {"archive_gb": ARCHIVE_GB, "payloads_gb": PAYLOADS_GB, "data_gb": TEXT_GB}


def of_today(values: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Settings in which those of earlier versions have become those of today. A line on stderr names each of them.

    What is set under the name of today counts. OperatorError for a number that is none.
    """
    old = {key: values[key] for key in EARLIER if key in values}
    now = {key: value for key, value in values.items() if key not in old}
    for key, value in old.items():
        match key:
            case "group_size" | "top_k" | "one_in":
                now.setdefault("vote_size", value)
            case "uplink_budget":
                if str(now.get("fit_uplink")).lower() == "true":
                    now["fit_uplink"] = value
            case "relay_for_others":
                if str(value).lower() in ("false", "0", "off", "no"):
                    now.setdefault("relay_mbit", 0)
            case _:
                now.setdefault("disk_gb", _sum_gb(old, where))
        print(
            f"{where}: {key} is no setting any more, and counts as {EARLIER[key]} = {now.get(EARLIER[key], OFF)}: "
            "write that instead",
            file=sys.stderr,
        )
    return now


def _sum_gb(old: Mapping[str, Any], where: str) -> float:
    try:
        return sum(float(old.get(key, usual)) for key, usual in PARTS_GB.items())
    except (TypeError, ValueError) as error:
        raise OperatorError(f"{where}: {', '.join(PARTS_GB)}: {error}; set disk_gb for the three together") from error


class _File(toml_file.TomlSettings):
    def _read_file(self, file_path: Any) -> dict[str, Any]:
        return of_today(super()._read_file(file_path), str(file_path))


def _of_environment() -> dict[str, Any]:
    """Settings that earlier variables stand for, unless the variable of today is set, too."""
    prefix = str(PeerSettings.model_config["env_prefix"])
    found = {name[len(prefix) :].lower(): text for name, text in os.environ.items() if name.startswith(prefix) and text}
    if not EARLIER.keys() & found.keys():
        return {}
    known = {key: text for key, text in found.items() if key in EARLIER or key in PeerSettings.model_fields}
    return {key: value for key, value in of_today(known, "environment").items() if value != found.get(key)}


def load_settings(**flags: Any) -> PeerSettings:
    """Settings from flags (None and empty: not given), environment and file. The OperatorError names every wrong value."""
    path = Path(os.environ.get("SWARMENTUM_CONFIG", "swarmentum.toml"))
    if "SWARMENTUM_CONFIG" in os.environ and not path.is_file():
        raise OperatorError(f"SWARMENTUM_CONFIG={path}: no such file; correct the path, or unset the variable")
    named = {name: value for name, value in flags.items() if value is not None and value != []}
    given = {**_of_environment(), **of_today(named, "given here")}
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

        def place(loc: toml_file.Place) -> str:
            return f"{path}:{toml_file.line_of(text, loc)}: " if _in(text, loc) else ""

        raise OperatorError(f"wrong settings:\n{toml_file.describe(error, place, _helped)}") from error


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
