"""The byte budget: in plan order, never exceeded, freed by the last rank, indifferent to old attempts."""

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest

from eagle3_train.records import PackKey
from eagle3_train.stream.flight import Delivery, Flight, Part, StaleAttemptError


async def _blocked(work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
    task = asyncio.ensure_future(work)
    await asyncio.sleep(0.01)
    assert not task.done()
    return task


def delivery(states: str, nbytes: int, bad: dict[int, str] | None = None) -> Delivery:
    return Delivery([Part(states, nbytes, [0])], bad or {})


async def _flight(max_bytes: int, ranks: int = 1, frees_after_s: float = 0.0) -> Flight:
    flight = Flight(max_bytes, ranks, frees_after_s)
    await flight.begin()
    return flight


def test_a_window_waits_for_bytes_and_the_ack_of_every_rank_frees_them() -> None:
    async def story() -> None:
        stream = await _flight(100, ranks=2)
        await stream.reserve(0, 0, 60)
        later = await _blocked(stream.reserve(0, 1, 50))
        await stream.keep(PackKey(0, 0, 0, 0), delivery("ref", 60))
        await stream.ack(0, 0, 0)
        await asyncio.sleep(0.01)
        assert not later.done()
        await stream.ack(0, 0, 1)
        await later
        counters = stream.counters
        assert (counters.reserved, counters.in_flight) == (50, 0)

    asyncio.run(story())


def test_a_window_that_can_never_fit_is_refused_not_waited_for() -> None:
    async def story() -> None:
        with pytest.raises(ValueError, match="needs 101 bytes"):
            await (await _flight(100)).reserve(0, 0, 101)

    asyncio.run(story())


def test_windows_are_reserved_in_plan_order_even_when_asked_for_out_of_order() -> None:
    async def story() -> None:
        stream = await _flight(100)
        later = await _blocked(stream.reserve(0, 1, 10))
        await stream.reserve(0, 0, 10)
        await later

    asyncio.run(story())


def test_every_pack_of_a_reserved_window_passes_without_new_bytes() -> None:
    async def story() -> None:
        stream = await _flight(100)
        for _ in range(4):
            await stream.reserve(0, 0, 90)
        assert stream.counters.reserved == 90

    asyncio.run(story())


def test_take_waits_for_delivery_and_a_repeated_delivery_changes_nothing() -> None:
    async def story() -> None:
        stream = await _flight(100)
        key = PackKey(0, 0, 0, 0)
        await stream.reserve(0, 0, 50)
        taking = await _blocked(stream.take(key))
        await stream.keep(key, delivery("first", 50, {1: "nan"}))
        await stream.keep(key, delivery("second", 50))
        assert await taking == delivery("first", 50, {1: "nan"})
        counters = stream.counters
        assert (counters.in_flight, counters.bad_samples) == (50, 1)

    asyncio.run(story())


def test_a_new_attempt_frees_everything_and_turns_old_callers_away() -> None:
    async def story() -> None:
        stream = await _flight(100)
        await stream.reserve(0, 0, 80)
        await stream.keep(PackKey(0, 0, 0, 0), delivery("ref", 80))
        waiting = await _blocked(stream.reserve(0, 1, 80))
        await stream.begin()
        with pytest.raises(StaleAttemptError):
            await waiting
        await stream.keep(PackKey(0, 0, 0, 1), delivery("late", 10))
        await stream.reserve(1, 0, 100)
        counters = stream.counters
        assert (counters.in_flight, counters.delivered_total) == (0, 80)

    asyncio.run(story())


def test_bytes_that_ray_keeps_after_the_ack_are_given_to_nobody_until_it_has_freed_them() -> None:
    async def story() -> None:
        stream = await _flight(100, frees_after_s=0.1)
        await stream.reserve(0, 0, 60)
        later = asyncio.ensure_future(stream.reserve(0, 1, 60))
        acknowledged = asyncio.ensure_future(stream.ack(0, 0, 0))
        await asyncio.sleep(0.05)
        assert not later.done()
        assert stream.counters.reserved == 60
        await acknowledged
        await later

    asyncio.run(story())


def test_a_new_attempt_waits_for_the_captures_of_the_old_one_which_still_fill_memory() -> None:
    async def story() -> None:
        stream = await _flight(100)
        async with stream.capturing(0, 0, 80):
            beginning = await _blocked(stream.begin())
            assert stream.counters.reserved == 80
        await beginning
        assert stream.counters.reserved == 0

    asyncio.run(story())
