"""The probe of training text on this machine: that of the person (`--data`), and that which a run names and may use."""

from __future__ import annotations

from node.admission.consent import STANDARD_LIBRARY
from node.config import PeerSettings
from node.data.sources import Source
from node.data.survey import look_at
from node.data.tally import SHARE_MAX
from node.doctor.doctor_facts import OwnText
from protos.run_config import RunConfig
from protos.web_address import is_web


def of_person(settings: PeerSettings) -> tuple[OwnText, ...]:
    """The text of `--data`. Raises DataError."""
    return () if settings.data is None or is_web(settings.data) else (_look(settings.data, settings),)


def of_run(config: RunConfig, settings: PeerSettings) -> tuple[OwnText, ...]:
    """The text on this machine that the run names, if `join` would read it. Raises DataError."""
    if settings.data is not None or not settings.allow_data:
        return ()
    named = [source for source, _, _ in config.data.sources()]
    return tuple(_look(source, settings) for source in named if source != STANDARD_LIBRARY and not is_web(source))


def _look(place: str, settings: PeerSettings) -> OwnText:
    found = look_at(Source(place))
    read, *left = found.lines()
    return OwnText(place, read, tuple(left), settings.allow_left_out or found.share <= SHARE_MAX)
