"""One rank's stream of captured packs: Ray Data calls engines, the worker pulls hidden states.

  consumes: the rank's packs of the plan, in order      produces: CapturedPack, in the same order
  waits for: the coordinator's byte budget, a replica, the pack's delivery

Each rank has its own ordered, unsplit dataset, so order follows the plan exactly and ranks meet only
in the optimiser step. A row is one pack and carries names and counts; the hidden states travel from the
engine's node to the trainer's through the object store, once.
"""

from __future__ import annotations

import dataclasses
import json
import warnings
from collections.abc import AsyncIterator, Iterator
from typing import Any

import numpy.typing as npt
import ray
import ray.data
from ray.actor import ActorHandle
from ray.util.annotations import RayDeprecationWarning

from eagle3_train.records import Pack, PackKey
from eagle3_train.stream.nodes import here
from eagle3_train.stream.plan import Window


@dataclasses.dataclass(frozen=True, slots=True)
class StreamLink:
    """How a rank reaches the stream."""

    coordinator: ActorHandle[Any]
    attempt: int
    bytes_per_token: int
    lookahead_packs: int


@dataclasses.dataclass(frozen=True, slots=True)
class CapturedPack:
    """Hidden states of one pack, in parts.

    parts: states as stored (states.py; bf16 viewed as int16) [tokens, boundaries * columns], and the indices in
    the pack of the samples whose states these are, in order. bad: unusable samples, index: reason.
    """

    pack: Pack
    parts: list[tuple[npt.NDArray[Any], list[int]]]
    bad: dict[int, str]


def captured_packs(windows: list[Window], rank: int, link: StreamLink) -> Iterator[CapturedPack]:
    """The rank's packs with their hidden states, in plan order.

    The arrays of a pack are views of the object store; drop them before acknowledging its window.
    """
    packs = [pack for window in windows for pack in window.packs if pack.rank == rank]
    rows = _dataset(windows, packs, link).iter_batches(
        batch_size=1, prefetch_batches=0, batch_format="numpy"
    )
    for number, (pack, row) in enumerate(zip(packs, rows, strict=True)):
        assert int(row["pack"][0]) == number, "Ray Data changed the order of packs"
        yield _take(pack, link)


def _take(pack: Pack, link: StreamLink) -> CapturedPack:
    """Wait for a pack and map its states; no reference outlives this call but the arrays."""
    if not pack.entries:
        return CapturedPack(pack, [], {})
    delivery = ray.get(link.coordinator.take.remote(pack.key(link.attempt)))
    states = ray.get([part.states for part in delivery.parts])
    indices = [part.indices for part in delivery.parts]
    return CapturedPack(pack, list(zip(states, indices, strict=True)), delivery.bad)


def _dataset(windows: list[Window], packs: list[Pack], link: StreamLink) -> ray.data.Dataset:
    """Lazy dataset: one block per pack, captured in order, a bounded number at once."""
    window_bytes = {w.index: w.tokens * link.bytes_per_token for w in windows}
    asked = [(pack.key(link.attempt), window_bytes[pack.window], pack.entries) for pack in packs]
    rows = [{"pack": number, "asked": json.dumps(ask)} for number, ask in enumerate(asked)]
    context = ray.data.DataContext.get_current()
    context.execution_options.preserve_order = True
    context.enable_progress_bars = False
    context.print_on_execution_start = False
    dataset = ray.data.from_items(rows, override_num_blocks=len(rows))
    with warnings.catch_warnings():  # ray 2.60 has no other spelling of max_concurrency yet
        warnings.simplefilter("ignore", RayDeprecationWarning)
        return dataset.map_batches(
            CaptureClient,
            fn_constructor_kwargs={"coordinator": link.coordinator},
            batch_size=1,
            batch_format="numpy",
            compute=ray.data.ActorPoolStrategy(
                size=1, max_tasks_in_flight_per_actor=link.lookahead_packs
            ),
            max_concurrency=link.lookahead_packs,
            **here(),
        )


class CaptureClient:
    """Ray Data operator: has one pack captured and passes its number on."""

    def __init__(self, coordinator: ActorHandle[Any]) -> None:
        self._coordinator = coordinator

    async def __call__(
        self, batch: dict[str, npt.NDArray[Any]]
    ) -> AsyncIterator[dict[str, npt.NDArray[Any]]]:
        """Wait until the pack's hidden states are in flight."""
        key, window_bytes, entries = json.loads(str(batch["asked"][0]))
        await self._coordinator.capture.remote(PackKey(*key), window_bytes, entries)
        yield {"pack": batch["pack"]}
