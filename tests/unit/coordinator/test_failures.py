"""What strangers say that keeps them from joining: counted by reason and version, within bounds, and shown. ADR 21."""

from pathlib import Path

import pytest

from coordinator.serving import metrics
from coordinator.serving.metrics import OTHER, VERSIONS_KEPT, Failures, Metrics
from protos.errors import NetworkError, RefusedError
from protos.run_facts import REASONS, failure_values, failure_words
from protos.run_sections import AdmissionConfig
from protos.v1 import coordinator_pb2 as pb
from protos.version import software_version
from tests.unit.coordinator.serving import identity, operated, peers, served
from tests.unit.coordinator.test_service import WAITS

RUN, MEMORY = bytes(32), pb.JoinFailure.JOIN_FAILURE_MEMORY


def labels(metrics: Metrics) -> int:
    return sum(
        sample.name == "swarmentum_join_failures_total"
        for family in metrics.registry.collect()
        for sample in family.samples
    )


def test_each_reason_has_a_word() -> None:
    assert set(REASONS) == set(pb.JoinFailure.values()) - {pb.JoinFailure.JOIN_FAILURE_UNSPECIFIED}


def test_free_identities_make_neither_labels_nor_memory_grow() -> None:
    metrics = Metrics()
    found = Failures(metrics)
    for number in range(500):
        found.count(RUN, number % 50, f"{number}.0.0")
        found.count(RUN, MEMORY, "<script>" * number)
    found.count(RUN, MEMORY, software_version())
    versions = {row.software_version for row in found.of(RUN)}
    assert len(versions) == VERSIONS_KEPT + 2, "the first ones, others, and always the coordinator's own"
    assert {OTHER, software_version()} <= versions
    assert len(found.of(RUN)) <= len(REASONS) * (VERSIONS_KEPT + 2)
    assert labels(metrics) == len(found.of(RUN))
    assert sum(row.count for row in found.of(RUN)) == 1_001


def test_an_address_and_all_together_may_tell_only_so_often() -> None:
    found = Failures(Metrics())
    assert sum(found.may_tell("one", 0) for _ in range(100)) == metrics.ADDRESS_TOLD_MAX
    everybody = Failures(Metrics())
    assert sum(everybody.may_tell(str(n), 0) for n in range(10_000)) == metrics.TOLD_MAX
    assert len(everybody._by_address._paid_until) <= metrics.ADDRESSES_KEPT


async def test_a_failure_reaches_run_show_the_facts_and_the_metrics(tmp_path: Path) -> None:
    async with served(tmp_path, WAITS) as here, peers(here, 1) as [peer]:
        await peer.client.connect()
        await peer.client.tell_failure(MEMORY)
        with pytest.raises(RefusedError, match="counts by itself"):
            await peer.client.tell_failure(pb.JoinFailure.JOIN_FAILURE_REFUSED)
        facts, _ = await peer.client.get_run()
        row = {"reason": "memory", "version": software_version(), "count": 1}
        assert failure_values(facts.failures) == [row]
        with operated(here, "run") as run:
            [shown] = await run("show", WAITS.name)
        assert shown["failures"] == [row]
        assert failure_words(shown["failures"]) == f"1 for memory (version {software_version()})"
        name = {"run": here.invite.run_id.hex()[:16], "reason": "memory", "version": software_version()}
        assert here.hub.metrics.registry.get_sample_value("swarmentum_join_failures_total", name) == 1
        for _ in range(metrics.ADDRESS_TOLD_MAX - 1):
            await peer.client.tell_failure(MEMORY)
        with pytest.raises((NetworkError, RefusedError), match="too many failures"):
            await peer.client.tell_failure(MEMORY)


async def test_who_is_refused_at_the_door_is_counted_too(tmp_path: Path) -> None:
    closed = WAITS.model_copy(update={"admission": AdmissionConfig(mode="allow_list", allowed=[identity(7).peer_id])})
    async with served(tmp_path, closed) as here, peers(here, 1) as [peer]:
        await peer.client.connect()
        with pytest.raises(RefusedError):
            await peer.client.may_join()
        facts, _ = await peer.client.get_run()
        assert [row["reason"] for row in failure_values(facts.failures)] == ["refused"]
