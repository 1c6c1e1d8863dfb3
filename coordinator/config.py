"""Settings of a coordinator: its folder, addresses and database; and the options that its commands share. Flags go before the
environment, then `coordinator.toml`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic import BaseModel, ConfigDict, Field, field_validator

from protos.disk import at_home, path_problem
from protos.errors import OperatorError
from protos.mistakes import ADVERTISED, LISTEN, LISTEN_OR_NONE, PROXY_HOST
from protos.toml_file import listed, read_layers

ADVERTISED_CHARACTERS_MAX = 256


class CoordinatorSettings(BaseModel):
    """Settings of `swarmentum-coordinator serve`."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    home: Path = Field(default=Path("~/.swarmentum/coordinator"), validate_default=True)
    """Folder of the key, the certificate and the journal."""

    listen: str = Field(default="0.0.0.0:7700", pattern=LISTEN)
    """host:port of the gRPC service; port 0 takes a free one."""

    advertise: str | None = Field(default=None, pattern=ADVERTISED, max_length=ADVERTISED_CHARACTERS_MAX)
    """host:port that invites name, or several with commas between them: a DNS name, IPv4, [IPv6]. By default this machine's
    address and the port it listens on."""

    database: str | None = None
    """SQLAlchemy URL of the journal; by default SQLite in the home folder."""

    metrics_listen: str | None = Field(default=None, pattern=LISTEN)
    """host:port of the Prometheus metrics (http://host:port/metrics); off by default."""

    web_listen: str = Field(default="127.0.0.1:7780", pattern=LISTEN_OR_NONE)
    """host:port of the web page of the runs, for browsers; `none` for no page. Other machines need 0.0.0.0 or a proxy."""

    web_hosts: tuple[str, ...] = ()
    """Names under which browsers find the page, for example that of a reverse proxy. Addresses and localhost need none."""

    operator_web_listen: str = Field(default="none", pattern=LISTEN_OR_NONE)
    """host:port of the operator's page, where a browser creates and steers runs after `web login`; `none` for no page."""

    operator_web_host: str | None = Field(default=None, pattern=PROXY_HOST)
    """The name of a reverse proxy with TLS before the operator's page. Links then begin with https:// and this name."""

    trace: bool = False
    """Send a trace of each step to an OpenTelemetry receiver: OTEL_EXPORTER_OTLP_ENDPOINT, by default http://localhost:4318."""

    @field_validator("home")
    @classmethod
    def _nameable(cls, value: Path) -> Path:
        value = at_home(value)
        if (why := path_problem(value)) is not None:
            raise ValueError(why)
        return value

    @field_validator("web_hosts", mode="before")
    @classmethod
    def _parts(cls, value: Any) -> Any:
        return listed(value)


def split_address(text: str) -> tuple[str, int]:
    """`host:port` or `[v6]:port` as (host, port); OperatorError for a port beyond 65535."""
    host, _, port = text.rpartition(":")
    if int(port) > 65535:
        raise OperatorError(f"{text}: port {port} is not a port; expected 0 to 65535")
    return host.strip("[]"), int(port)


EXIT_CODES = (
    "Exit codes: 0 done, 1 failed, 2 wrong use or configuration, 3 unreachable, 4 refused by the coordinator, "
    "130 interrupted."
)
Home = Annotated[
    Path | None,
    typer.Option(help="Folder of the key, the certificate and the journal (default: ~/.swarmentum/coordinator)."),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON, one object a line, for programs.")]
AllowCode = Annotated[
    bool,
    typer.Option(
        "--allow-code",
        help="Call the Python code that the file names (`model.factory`) to know the layout. Use it only for code you trust.",
    ),
]
Key = Annotated[
    Path | None,
    typer.Option(help="In a run with operators' keys: the file of yours (default: the coordinator's own key)."),
]
RunName = Annotated[str, typer.Argument(metavar="RUN", help="The run's name, or the start of its id.")]


def option(key: str, *names: str, note: str = "") -> Any:
    """The option of a setting, whose field says what it is and its default."""
    field = CoordinatorSettings.model_fields[key]
    default = f"default: {field.default}" if isinstance(field.default, str) else ""
    notes = "; ".join(word for word in (note, default) if word)
    return typer.Option(*names, help=str(field.description).rstrip(".") + (f" ({notes})." if notes else "."))


def settings(**flags: Any) -> CoordinatorSettings:
    """Flags over the environment (SWARMENTUM_COORDINATOR_<NAME>) over coordinator.toml; OperatorError says which is wrong."""
    found = read_layers("SWARMENTUM_COORDINATOR_", "coordinator.toml", CoordinatorSettings.model_fields)
    given = {name: value for name, value in flags.items() if value is not None}
    return found.made(CoordinatorSettings, {**found.of_file, **found.of_environment, **given})
