"""`python -m tests.system.two_faced_peer INVITE HOME`: a peer as `swarmentum join` starts it, which gossips a second
announcement for each step, of a payload that it holds, too."""

import sys
from pathlib import Path

from node.app import join
from node.config import PeerSettings
from node.swarm.session import Session
from protos.console import configure_logging, exit_with
from protos.envelope import Kind, parse, seal
from protos.slices import hash_of
from protos.v1 import update_pb2

honest = Session.publish


async def publish(session: Session, data: bytes, announcement: update_pb2.Announcement) -> None:
    """What an honest peer does, and then the other face."""
    await honest(session, data, announcement)
    update = parse(update_pb2.UpdatePayload, data)
    update.votes = bytes(byte ^ 0xFF for byte in update.votes)
    other = update.SerializeToString(deterministic=True)
    session.parts.publication._payloads.put(announcement.step, hash_of(other), other)
    announcement.payload_sha256 = hash_of(other)
    again = seal(session.host.identity, Kind.KIND_ANNOUNCEMENT, session.parts.invite.run_id, announcement)
    await session.parts.topic.say(again.SerializeToString(deterministic=True))


def main() -> None:
    configure_logging(as_json=True)
    join(sys.argv[1], PeerSettings(home=Path(sys.argv[2]), listen="127.0.0.1:0", threads=1, allow=["code", "data"]))


if __name__ == "__main__":
    Session.publish = publish  # type: ignore[method-assign]
    exit_with(main)
