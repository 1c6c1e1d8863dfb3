"""What a run needs of a machine: the verdicts, without a machine."""

from dataclasses import replace
from typing import Any

import pytest

from node.model.device import DeviceMemory
from node.model.size import ModelSize
from node.training.need import Need, building, disk, fit, fitting, need_of, whole_gradients
from protos.optimizer_config import OptimizerConfig
from protos.text import amount, count

GB = 10**9
SIZE = ModelSize(parameters=1000, model_bytes=4040, largest=300)


def optimizer(**values: Any) -> OptimizerConfig:
    return OptimizerConfig.model_validate(values)


@pytest.mark.parametrize(
    ("settings", "tensors"),
    [
        ({"beta2": 0}, 3),  # weights, momentum, gradients
        ({}, 4),  # and the second moment
        ({"beta2": 0, "base": {"name": "muon", "momentum": 0.9}}, 4),
        ({"beta2": 0, "base": {"name": "adamw", "beta1": 0.9}}, 5),
        ({"beta2": 0, "overlap": True}, 4),
        ({"beta2": 0, "magnitudes": True, "base": {"name": "sgd", "momentum": 0}, "local": {"steps": 4}}, 6),
    ],
)
def test_the_state_is_counted_by_the_runs_own_method(settings: dict[str, Any], tensors: int) -> None:
    assert need_of(SIZE, optimizer(**settings)).state == 4040 + (tensors - 1) * 4000


def test_an_anchor_needs_no_gradients_and_ranks_share() -> None:
    anchor = need_of(SIZE, optimizer(beta2=0), trains=False)
    assert anchor.state == 4040 + 4000
    assert anchor.on("cpu").state == 4040 + 4000 + 500, "nobody writes its momentum; the copy of a snapshot is there"
    assert (anchor.private, anchor.copies, anchor.disk) == (0, 4000, 3 * 4000), "nor saves it"
    assert need_of(SIZE, optimizer(beta2=0), ranks=4).state == 12040 // 4


NEED = Need(parameters=85_000_000, weights=GB, state=4 * GB, sample=GB, snapshot=GB // 2, private=GB * 3 // 4)


def test_the_micro_batch_is_halved_until_it_fits() -> None:
    assert [fitting(NEED, DeviceMemory(int(free * GB), 99 * GB), 8) for free in (20, 12, 9, 6, 5.2, 4.9)] == [
        8,
        4,
        4,
        1,
        1,
        0,
    ]
    assert fitting(NEED, DeviceMemory(7 * GB, 8 * GB), 6) == 1, "6, 3, 1"


def say(free: float, **given: Any) -> tuple[int, str]:
    flags = {"wanted": 8, "chosen": False, "checkpointing": False} | given
    return fit(NEED, DeviceMemory(int(free * GB), 24 * GB), "cuda:0", flags.pop("wanted"), **flags)


def test_what_fits_is_said_in_one_line() -> None:
    assert say(20) == (8, "85 M parameters, 12 GB of 20 GB (cuda:0)")
    assert say(9) == (4, "85 M parameters, 8.0 GB of 9.0 GB (cuda:0), micro-batch 4 instead of 8")
    assert fit(NEED, None, "tpu", 8, chosen=False, checkpointing=False)[0] == 8


@pytest.mark.parametrize(
    ("free", "given", "words"),
    [
        (3.9, {}, ["85 M parameters", "need 4.0 GB", "free are 3.9 GB of 24 GB (cuda:0)", "--device"]),
        (4.5, {}, ["one sample", "need 5.0 GB", "--set activation_checkpointing=true"]),
        (9, {"chosen": True}, ["micro_batch 8 does not fit", "need 12 GB", "take --set micro_batch=4"]),
    ],
)
def test_what_does_not_fit_says_need_have_and_what_to_do(free: float, given: dict[str, Any], words: list[str]) -> None:
    fits, why = say(free, **given)
    assert fits == 0
    assert "\n" not in why
    for word in words:
        assert word in why


def test_nobody_is_told_to_take_what_is_taken_already() -> None:
    assert "--set activation_checkpointing=true" not in say(4.5, checkpointing=True)[1]


def test_disk_and_main_memory() -> None:
    assert disk(NEED, 4 * GB, 0, "/home") == (True, "3.0 GB of 4.0 GB free at /home")
    good, why = disk(NEED, 2 * GB, 0, "/home")
    assert not good
    assert "need 2.5 GB, free are 2.0 GB at /home" in why
    assert "--home" in why
    assert disk(NEED, 2 * GB, 2 * GB, "/home")[0], "what is there already is not needed again"
    assert building(NEED, DeviceMemory(NEED.copies, 2 * GB))[0]
    assert "main memory" in building(NEED, DeviceMemory(GB - 1, 2 * GB))[1]


def test_a_cpu_has_the_copies_of_snapshot_and_momentum_in_its_memory_too() -> None:
    """A machine on which a run fitted ran out of memory at the first snapshot."""
    room = DeviceMemory(int(5.2 * GB), 24 * GB)
    assert fit(NEED, room, "cuda:0", 1, chosen=False, checkpointing=False)[0] == 1
    fits, why = fit(NEED, room, "cpu", 1, chosen=False, checkpointing=False)
    assert not fits
    assert "need 5.2 GB" in why
    weights = replace(NEED, weights=0)
    assert building(weights, DeviceMemory(NEED.copies, 2 * GB))[0]
    assert "cannot be saved" in building(weights, DeviceMemory(NEED.copies - 1, 2 * GB))[1]


@pytest.mark.parametrize("memory", ["full", "small"])
def test_checks_of_votes_take_two_gradients_more_in_the_main_memory(memory: Any) -> None:
    plain, checking = (need_of(SIZE, optimizer(), memory=memory, checks=on) for on in (False, True))
    assert checking.checks == 2 * 4000
    gradients = 0 if memory == "full" else 4000 - 4 * 300  # a peer that saves memory keeps whole ones
    assert checking.on("cpu").state == plain.on("cpu").state + 8000 + gradients
    assert checking.on("cuda").state == plain.on("cuda").state + gradients
    main = replace(checking, weights=0)
    assert building(main, DeviceMemory(main.copies + 8000, GB))[0]
    assert "gradients for checks of votes, need" in building(main, DeviceMemory(main.copies + 7999, GB))[1]
    assert need_of(SIZE, optimizer(), trains=False, checks=True).checks == 0, "an anchor checks none"


def test_room_for_two_snapshots_is_asked_for_at_the_start() -> None:
    """Peers ended in the middle of a run when their third snapshot did not fit."""
    sizes = need_of(SIZE, optimizer(base={"name": "muon", "momentum": 0.9}))
    assert (sizes.snapshot, sizes.private) == (8000, 8000)
    assert sizes.disk == 3 * 8000 + 2 * 8000
    assert disk(sizes, 4 * 8000, 0, "here") == (True, "32 kB of 32 kB free at here")
    assert not disk(sizes, 4 * 8000 - 1, 0, "here")[0]
    assert replace(sizes, stores=False).disk == 8000
    recipe = optimizer(beta2=0, nesterov=0.9, magnitudes=True, base={"name": "sgd", "momentum": 0}, local={"steps": 4})
    assert need_of(SIZE, recipe).private == (1 + 1 + 2) * 4000, "momentum, Nesterov's, and AdamW's two"


def test_amounts() -> None:
    assert [amount(size) for size in (0, 512, 1.4e9, 85e6, 999.6e6, 22e15)] == [
        "0 B", "512 B", "1.4 GB", "85 MB", "1.0 GB", "22 PB",
    ]  # fmt: skip
    assert [count(things) for things in (640, 885_888, 5.5e12)] == ["640", "886 k", "5.5 T"]


def small(trains: bool = True, checks: bool = False, **values: Any) -> Need:
    return need_of(SIZE, optimizer(**values), trains=trains, memory="small", samples=8, checks=checks)


def test_a_peer_that_saves_memory_has_a_short_momentum_one_gradient_and_copies_on_the_disk() -> None:
    whole, own = need_of(SIZE, optimizer()), small()
    assert own.state == 4040 + 2000 + 4 * 300, "weights, momentum, the largest gradient"
    assert (own.private, own.copies) == (2000, 0)
    assert own.disk == 3 * 4000 + 2 * 2000 + own.snapshot + own.private
    assert whole.disk == 3 * 4000 + 2 * 8000
    several = need_of(SIZE, optimizer(), samples=8).on("cpu")
    assert several.memory(7) - several.memory(8) == 1000, "holes between the gradients of several micro-batches"
    assert own.on("cpu").state == own.state + own.heap == own.state + 500
    assert own.on("cuda").state == own.state + own.casts == own.state + 2000, "bf16 copies of the weights"
    assert own.memory(8) == own.state
    assert own.memory(7) == own.state + 2000, "sums over micro-batches"
    assert own.on("cpu").memory(7) == own.state + 500 + 3000, "and what lies between"
    assert small(trains=False).state == 4040 + 2000
    assert small(trains=False).on("cpu").memory(1) == 4040 + 500
    assert need_of(SIZE, optimizer(beta2=0), memory="small") == need_of(SIZE, optimizer(beta2=0))
    assert need_of(SIZE, optimizer(), casts=False).casts == need_of(SIZE, optimizer(), trains=False).casts == 0


@pytest.mark.parametrize(
    ("given", "why", "tensors"),
    [({"overlap": True}, "overlap makes them", 2), ({"checks": True}, "the run checks votes", 1)],
)
def test_what_needs_whole_gradients_is_counted_with_them(given: dict[str, Any], why: str, tensors: int) -> None:
    assert small(**given).memory(1) == 4040 + 2000 + tensors * 4000
    checks = given.pop("checks", False)
    assert whole_gradients(optimizer(**given), checks=checks).startswith(why)
    assert whole_gradients(optimizer(), checks=False) == ""


def test_local_steps_need_whole_gradients() -> None:
    assert whole_gradients(optimizer(recipe="diloco-demo"), checks=True) == "local steps need them"


def test_with_the_weights_of_two_blocks_a_card_has_those_and_what_is_no_block() -> None:
    size = replace(SIZE, block=150, outside=400)
    own, whole = (need_of(size, optimizer(), memory=memory, samples=8) for memory in ("stream", "host"))  # type: ignore[arg-type]
    assert own.on("cuda:0").state == 2 * (400 + 2 * 150) + 40 + 2 * 2 * 300
    assert own.main(7) == whole.main(7)
    assert own.on("cpu").memory(7) == own.on("cuda").state + small().on("cpu").memory(7)
    assert need_of(size, optimizer(), memory="stream", trains=False).on("cuda").memory(1) == 0


def test_frozen_parameters_are_in_snapshots_and_weights_alone() -> None:
    """Of a run that trained 1 % the snapshots were counted as 1 %, and the card's bf16 weights as fp32 ones of each block."""
    size = replace(SIZE, frozen=9000, model_bytes=4 * 10_000 + 40, block=1500, outside=4000)
    whole = need_of(size, optimizer(beta2=0))
    assert (whole.state, whole.snapshot, whole.private) == (40_040 + 2 * 4000, 40_000, 4000)
    stream, there = (need_of(size, optimizer(), memory=memory).on("cuda").state for memory in ("stream", "host"))  # type: ignore[arg-type]
    assert (stream, there) == (2 * (4000 + 2 * 1500) + 40 + 2 * 2 * 300, 2 * 10_000 + 40 + 2 * 2 * 300)


def host(**values: Any) -> Need:
    return need_of(SIZE, optimizer(**values), memory="host", samples=8)


def test_a_peer_with_its_state_in_the_main_memory_has_bf16_weights_and_two_gradients_on_the_card() -> None:
    """Two: the table's and the head's are one parameter's, and are added up there."""
    own, least = host(), small()
    assert own.on("cuda:0").state == own.on("cuda:0").memory(1) == 2000 + 40 + 2 * 2 * 300
    assert own.main(8) == least.on("cpu").memory(8)
    assert own.main(7) == own.main(8) + 2500, "with sums"
    assert (own.copies, own.disk) == (0, least.disk)
    for size in (7, 8):
        assert own.on("cpu").memory(size) == own.on("cuda").state + least.on("cpu").memory(size), (
            "a CPU plays both parts"
        )


@pytest.mark.parametrize("given", [{"beta2": 0}, {"method": "paper"}, {"beta2": 0, "overlap": True}])
def test_without_a_second_moment_the_main_memory_holds_the_whole_state(given: dict[str, Any]) -> None:
    whole = need_of(SIZE, optimizer(**given))
    assert host(**given).on("cuda").state == 2000 + 40 + 1200
    assert host(**given).main(1) == whole.on("cpu").memory(1)


def test_an_anchor_takes_no_memory_of_the_card() -> None:
    anchor = need_of(SIZE, optimizer(), trains=False, memory="host")
    assert anchor.on("cuda").memory(1) == 0
    assert anchor.main(1) == 4040 + 500


def test_a_main_memory_that_is_too_small_for_the_state_is_named() -> None:
    own = host()
    assert building(own, DeviceMemory(own.main(7), GB), 7) == (True, "10 kB of 10 kB main memory")
    assert building(own, DeviceMemory(own.main(7) - 1, GB), 8)[0], "a larger micro-batch needs no sums"
    good, why = building(own, DeviceMemory(own.main(7) - 1, GB), 7)
    assert not good
    assert why.startswith(
        "the peer's state does not fit: with memory = host or stream, weights, momentum and optimizer need 10 kB of main"
    )
    fits, why = fit(own, DeviceMemory(3000, 4000), "cuda:0", 1, chosen=False, checkpointing=False)
    assert not fits
    assert "3.2 kB for bf16 weights and a gradient" in why
