"""What a real peer answered to `me` (a run on loopback), for tests that need another value here and there."""

from typing import Any


def fate(step: int, outcome: str = "accepted", why: str = "") -> dict[str, Any]:
    samples = 3 if outcome == "accepted" else 0
    tokens = 32 * samples
    return {
        "step": step, "outcome": outcome, "why": why, "samples": samples, "all_samples": 6, "tokens": tokens, "peers": 2,
        "loss": 4.2,
    }  # fmt: skip


def line(text: str, level: str = "info") -> dict[str, Any]:
    return {"at": "2026-11-23T15:52:07.120000Z", "level": level, "text": text}


def told(**changed: Any) -> dict[str, Any]:
    """An answer with some values changed."""
    values: dict[str, Any] = {
        "id": "12D3KooWJ8Zr3pRZ5qYtKqg8mJq1V6pWkmR1yG1cTz1FxvKpSdQe", "device": "cpu", "memory": "full", "memory_why": "",
        "steps_applied": 24, "step": 24,
        "votes_accepted": 24, "tokens": 2304, "reading_seconds": 0.01, "loss": 4.0641, "payload_bytes_sent": 16_000,
        "payload_bytes_received": 16_000, "wire_bytes_sent": 19_000, "wire_bytes_received": 18_000, "resyncs": 0,
        "samples_accepted": 72, "tokens_accepted": 2304, "share": 0.5, "seconds": 132.0, "entered": True, "waiting": "",
        "waits_for": "", "doors": {},
        "loading": "",
        "checks": "", "step_seconds": 0.34, "seconds_left": 331.8, "share_of_all": 0.5,
        "access": {"reachable": "private", "relays": 2, "direct": 3, "relayed": 1},
        "load": {"busy": 0.93, "own": 665_000_000, "used": 3_200_000_000, "total": 25_000_000_000},
        "run": "00" * 32, "name": "owners", "steps": 1000, "committed_step": 24, "anchor": False, "paused": False,
        "paused_by_owner": False, "pause_seconds_left": 0, "held": "",
        "finished": False, "month": {"up": 1_200_000_000, "down": 900_000_000, "upload_gb": 50.0, "download_gb": None},
        "ending": None, "last": [fate(step) for step in range(24, 0, -1)],
        "losses": [5.4 - 0.05 * step for step in range(24)],
        "lines": [line("run found: run owners, steps 1000, head 0"), line("snapshot agreed: snapshot 0")],
        "log_file": "/home/ada/.swarmentum/peer/peer.log",
    }  # fmt: skip
    assert not changed.keys() - values.keys(), changed.keys() - values.keys()
    return {**values, **changed}
