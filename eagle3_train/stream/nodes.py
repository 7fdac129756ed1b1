"""Which node an actor lives on: what all of a run hangs on lives with the driver, so that another node may die."""

from __future__ import annotations

from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy


def on(node_id: str) -> dict[str, Any]:
    """Options of an actor that lives on this node or not at all."""
    strategy = NodeAffinitySchedulingStrategy(node_id, soft=False)
    return {"num_cpus": 0, "scheduling_strategy": strategy}


def here() -> dict[str, Any]:
    """Options of an actor that lives on the caller's node."""
    return on(ray.get_runtime_context().get_node_id())
