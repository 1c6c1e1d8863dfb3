"""Addresses of the web in any case and spelling: one parser says what is an address, and what needs a hash."""

from pathlib import Path

import pytest
from pydantic import ValidationError

from node.archive import ledger
from node.config import PeerSettings
from node.export.card import facts_of
from node.text import open_text
from protos.address import is_web, web_problem
from protos.errors import DataError, OperatorError
from protos.invite import Invite, is_link
from protos.run_config import DataConfig, RunConfig

ANY_CASE = (
    "HTTP://127.0.0.1:1/x",
    "Https://example.org/x",
    "hTTp://example.org",
    " http://example.org",
    "\thttps://a.b/c",
)


@pytest.mark.parametrize("source", [*ANY_CASE, "http:example.org", "HTTPS:/x", "http://[::1", "h\nttp://example.org/x"])
def test_what_a_download_would_take_for_an_address_needs_a_hash(source: str) -> None:
    assert is_web(source)
    with pytest.raises(ValidationError):
        DataConfig(source=source)


@pytest.mark.parametrize("source", ["stdlib", "/x/http", "x", "file:///x", "ftp://x", "./http:", "C:/text", ""])
def test_what_is_a_path_is_none(source: str) -> None:
    assert not is_web(source)
    assert web_problem(source) == ""


@pytest.mark.parametrize(
    "source", ["https://", "http:x", "https://a b/c", "http://[::1", "http://a:99999/x", "https://a/\x1b[2J"]
)
def test_an_address_that_nobody_can_use_is_a_mistake_with_its_reason(source: str) -> None:
    assert web_problem(source)
    with pytest.raises(ValidationError, match="no address that a peer can use"):
        DataConfig(source=source, sha256="ab" * 32)
    with pytest.raises(ValidationError):
        DataConfig(source="https://example.org/x", sha256="ab" * 32, mirrors=(source,))


def test_an_address_in_any_case_is_one_with_a_hash() -> None:
    config = DataConfig(source="HTTPS://example.org/x", sha256="ab" * 32, mirrors=("Http://example.net/y",))
    facts = facts_of(RunConfig(data=config), bytes(32))
    assert facts["data"] == "HTTPS://example.org/x", "and no file that each peer had"


def test_a_peer_takes_no_text_of_the_web_without_a_hash(tmp_path: Path) -> None:
    """A run whose genesis was made by somebody else's program."""
    data = DataConfig.model_construct(**{**dict(DataConfig()), "source": "HTTP://127.0.0.1:1/x", "sha256": None})
    config = RunConfig.model_construct(**{**dict(RunConfig()), "data": data})
    with pytest.raises(DataError, match="without a hash"):
        open_text(config, PeerSettings(home=tmp_path, allow=["data"]), None, lambda _: None)


@pytest.mark.parametrize("scheme", ["SWARMENTUM://", "Swarmentum://", "swarmentum://"])
def test_an_invite_link_is_one_in_any_case(scheme: str) -> None:
    invite = Invite(bytes(32), ("127.0.0.1:1",), bytes(32), bytes(32), (), "swarm")
    link = scheme + invite.link().removeprefix("swarmentum://")
    assert is_link(link)
    assert is_link(f' "{link}"')
    assert Invite.parse(link) == invite
    with pytest.raises(OperatorError, match="damaged"):
        ledger.of(scheme + "x")
