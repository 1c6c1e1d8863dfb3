"""The votes that wait for the training thread are bounded in bytes, in order, and never so that nothing goes on."""

import asyncio

from node.swarm.entries import Budget


async def taken(budget: Budget, step: int, size: int) -> asyncio.Task[None]:
    task = asyncio.create_task(budget.reserve(step, size))
    for _ in range(3):
        await asyncio.sleep(0)
    return task


async def test_it_is_never_beyond_its_bound_and_the_first_always_fits() -> None:
    budget = Budget(100)
    assert (await taken(budget, 1, 1000)).done(), "an entry that is larger than the bound goes alone"
    waits = await taken(budget, 2, 60)
    assert not waits.done()
    budget.release(1)
    await waits
    assert (await taken(budget, 3, 40)).done()
    waits = await taken(budget, 4, 1)
    assert not waits.done()
    assert budget.held_bytes == 100
    budget.release(7)
    assert not (await taken(Budget(0), 1, 5)).cancelled()
    assert not waits.done()
    budget.release(3)
    await waits
    assert budget.held_bytes == 61


async def test_a_following_that_ends_lets_go_of_whoever_waits() -> None:
    budget = Budget(10)
    await budget.reserve(1, 10)
    waits = await taken(budget, 2, 10)
    assert not waits.done()
    budget.clear()
    async with asyncio.timeout(240):
        await waits
