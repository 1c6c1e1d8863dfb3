"""Which addresses are any, and who is told which."""

import ipaddress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protos.address import (
    ADDRESSES_SHOWN_MAX,
    Network,
    Scope,
    is_relayed,
    network_of,
    parse_address,
    shown,
    site,
    usable,
)
from protos.errors import Reason, Refusal
from protos.identity import Identity
from protos.text import printable

ADA = Identity.from_seed(b"a" * 32).peer_id
BOB = Identity.from_seed(b"b" * 32).peer_id


def ip(text: str) -> Network:
    return ipaddress.ip_address(text)


@pytest.mark.parametrize(
    ("text", "scope"),
    [
        (f"/ip4/8.8.8.8/tcp/4001/p2p/{ADA}", Scope.PUBLIC),
        (f"/ip4/8.8.8.8/udp/4001/quic-v1/p2p/{ADA}", Scope.PUBLIC),
        (f"/ip6/2606:4700::1/tcp/4001/p2p/{ADA}", Scope.PUBLIC),
        (f"/dns4/peer.example.org/tcp/443/wss/p2p/{ADA}", Scope.PUBLIC),
        (f"/dns/localhost/tcp/4001/p2p/{ADA}", Scope.LOOPBACK),
        (f"/dns/nas/tcp/4001/p2p/{ADA}", Scope.PRIVATE),
        (f"/ip4/192.168.1.2/tcp/4001/p2p/{ADA}", Scope.PRIVATE),
        (f"/ip4/100.64.0.1/tcp/4001/p2p/{ADA}", Scope.PRIVATE),
        (f"/ip6/fd00::1/tcp/4001/p2p/{ADA}", Scope.PRIVATE),
        (f"/ip6/::1/udp/4001/quic-v1/p2p/{ADA}", Scope.LOOPBACK),
        (f"/ip6/::ffff:127.0.0.1/tcp/4001/p2p/{ADA}", Scope.LOOPBACK),
        (f"/ip4/127.0.0.1/tcp/4001/p2p/{ADA}", Scope.LOOPBACK),
        (f"/ip4/8.8.8.8/tcp/4001/p2p/{BOB}/p2p-circuit/p2p/{ADA}", Scope.PUBLIC),
    ],
)
def test_what_peers_and_libp2p_say_parses(text: str, scope: Scope) -> None:
    found = parse_address(text, ADA)
    assert (found.text, found.scope, found.peer) == (text, scope, ADA)
    assert found.relay == (BOB if "p2p-circuit" in text else "")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "/",
        "garbage",
        "/p2p/x",
        f"/p2p/{ADA}",
        f"/ip4/1.2.3/tcp/1/p2p/{ADA}",
        f"/ip4/0.0.0.0/tcp/1/p2p/{ADA}",
        f"/ip4/255.255.255.255/udp/1/quic-v1/p2p/{ADA}",
        f"/ip4/224.0.0.1/tcp/1/p2p/{ADA}",
        f"/ip6/fe80::1%eth0/tcp/1/p2p/{ADA}",
        f"/ip4/1.2.3.4/tcp/0/p2p/{ADA}",
        f"/ip4/1.2.3.4/tcp/65536/p2p/{ADA}",
        f"/ip4/1.2.3.4/tcp/٣/p2p/{ADA}",
        f"/ip4/1.2.3.4/udp/1/p2p/{ADA}",
        f"/ip4/1.2.3.4/sctp/1/p2p/{ADA}",
        f"/unix/tmp/x/p2p/{ADA}",
        f"/dns4/-x/tcp/1/p2p/{ADA}",
        f"/dns4/1.2.3.4/tcp/1/p2p/{ADA}",
        f"/dns4/x\x1b[31m/tcp/1/p2p/{ADA}",
        f"/ip4/1.2.3.4/tcp/1/p2p/{ADA}/",
        f"/ip4/1.2.3.4/tcp/1/p2p-circuit/p2p/{ADA}",
        f"/ip4/1.2.3.4/tcp/1/p2p/{BOB}/p2p/{ADA}",
        "/ip4/1.2.3.4/tcp/1",
        "/ip4/1.2.3.4/tcp/1/p2p/[/x]",
        f"/dns4/{'a' * 300}/tcp/1/p2p/{ADA}",
    ],
)
def test_everything_else_is_refused(text: str) -> None:
    with pytest.raises(Refusal):
        parse_address(text)
    assert usable([text]) == []


def test_an_address_leads_to_its_signer() -> None:
    theirs = f"/ip4/8.8.8.8/tcp/1/p2p/{BOB}"
    with pytest.raises(Refusal, match="not the signer's") as error:
        parse_address(theirs, ADA)
    assert error.value.reason is Reason.UNKNOWN_SIGNER
    good = f"/ip4/8.8.8.8/tcp/1/p2p/{ADA}"
    assert [address.text for address in usable([theirs, "junk", good, good], ADA)] == [good], "one spoils no other"


@given(st.text(max_size=80))
def test_no_text_gets_out_of_the_parser_but_as_a_refusal(text: str) -> None:
    for whole in (text, f"/ip4/{text}/tcp/1/p2p/{ADA}", f"/ip4/1.2.3.4/{text}/p2p/{ADA}", f"/ip6/{text}"):
        try:
            assert parse_address(whole).text == whole
        except Refusal:
            continue


@pytest.mark.parametrize(
    ("peer", "counts_as"),
    [
        ("ipv4:192.0.2.1:4711", "192.0.2.1"),
        ("ipv6:%5B2001:db8::1%5D:4711", "2001:db8::/64"),
        ("ipv6:%5B2001:db8::ffff%5D:1", "2001:db8::/64"),
        ("ipv6:%5B::ffff:192.0.2.1%5D:4711", "192.0.2.1"),
        ("ipv4:127.0.0.1:1", "loopback"),
        ("ipv6:%5B::1%5D:1", "loopback"),
        ("unix:/tmp/x", "loopback"),
        ("", "loopback"),
        ("ipv4:garbage", "loopback"),
    ],
)
def test_where_a_connection_comes_from(peer: str, counts_as: str) -> None:
    assert site(network_of(peer)) == counts_as


def test_who_is_told_which_addresses() -> None:
    loopback, home, public = (f"/ip4/{at}/tcp/1/p2p/{ADA}" for at in ("127.0.0.1", "192.168.1.2", "8.8.8.8"))
    quic, relayed = f"/ip4/8.8.8.8/udp/1/quic-v1/p2p/{ADA}", f"/ip4/9.9.9.9/tcp/1/p2p/{BOB}/p2p-circuit/p2p/{ADA}"
    here, lan, other_lan = ip("127.0.0.1"), ip("192.168.1.2"), ip("192.168.1.7")
    router, elsewhere = ip("8.8.8.8"), ip("1.1.1.1")

    def told(own: list[str], of: Network, to: Network) -> list[str]:
        return shown(usable(own), of, to)

    everything = [loopback, home, quic, public, relayed]
    assert told(everything, router, elsewhere) == [public, relayed]
    assert told([loopback, home], router, elsewhere) == [], "nobody outside can dial them"
    assert told([home, loopback], router, router) == [home, loopback], "behind one router"
    assert told([loopback], here, here) == [loopback]
    assert told([loopback], here, None) == [loopback], "no network is this machine"
    assert told([loopback], here, lan) == []
    assert told([home, loopback], lan, other_lan) == [home], "of one private network with the coordinator"
    assert told([home], here, other_lan) == [home], "beside the coordinator, in its private network"
    assert told([home], lan, elsewhere) == []
    assert told([home, relayed], router, elsewhere) == [relayed]
    six, over_six = f"/ip6/2a0a:11:1::2/tcp/4001/p2p/{ADA}", ip("2a0a:11:3::2")
    assert told([public, quic, six], router, over_six)[0] == six, "a peer with IPv6 alone can dial no other"
    assert told([six, public, quic], over_six, elsewhere)[0] in {public, quic}
    assert told([public], router, over_six) == [public], "it may have IPv4, too"
    bridge = f"/ip4/172.17.0.1/tcp/1/p2p/{ADA}"
    assert told([bridge, home], lan, other_lan) == [home, bridge], "first where the coordinator sees the peer"
    assert len(told([public] + [f"/ip4/8.8.8.{n}/tcp/1/p2p/{ADA}" for n in range(9)], router, elsewhere)) == (
        ADDRESSES_SHOWN_MAX
    )


@pytest.mark.parametrize(
    ("addresses", "relayed"),
    [
        ((), False),
        ((f"/ip4/192.168.1.9/tcp/1/p2p/{ADA}",), False),
        ((f"/ip4/192.168.1.9/tcp/1/p2p/{ADA}", f"/ip4/8.8.8.8/tcp/1/p2p/{BOB}/p2p-circuit/p2p/{ADA}"), True),
        ((f"/ip4/9.9.9.9/tcp/1/p2p/{ADA}", f"/ip4/8.8.8.8/tcp/1/p2p/{BOB}/p2p-circuit/p2p/{ADA}"), False),
        (("no address",), False),
    ],
)
def test_a_peer_is_relayed_if_nobody_outside_can_dial_it(addresses: tuple[str, ...], relayed: bool) -> None:
    assert is_relayed(addresses) is relayed


@given(st.text(max_size=300))
def test_shown_text_prints_on_one_line(text: str) -> None:
    found = printable(text, 100)
    assert found.isprintable()
    assert len(found) == min(len(text), 100)


def test_escape_codes_and_bidi_marks_do_not_print() -> None:
    assert printable("\x1b]0;owned\x07 cuda\n\u202ex") == "?]0;owned? cuda??x"
    assert printable("cuda: NVIDIA H200 é 日本") == "cuda: NVIDIA H200 é 日本"
