"""Whether the connected cluster fits: the same versions on every node (one small task each), room for the stream."""

from __future__ import annotations

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from eagle3_train.preflight.check import Check
from eagle3_train.provenance import versions


def connected_nodes() -> tuple[tuple[int, float | None], ...]:
    """(GPUs, CPUs) of each alive node of the connected cluster; empty without one."""
    if not ray.is_initialized():
        return ()
    found = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    return tuple((int(node.get("GPU", 0)), node.get("CPU", 0.0)) for node in found)


def node_versions() -> Check:
    """Ask every alive node of the connected cluster."""
    ask = ray.remote(versions)
    nodes = [node for node in ray.nodes() if node["Alive"]]
    answers = [
        ask.options(
            num_cpus=0,
            scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False),
        ).remote()
        for node in nodes
    ]
    names = [f"{node['NodeManagerAddress']} ({node['NodeID'][:6]})" for node in nodes]
    found = dict(zip(names, ray.get(answers), strict=True))
    return compare_versions(found)


def object_store(max_bytes_in_flight: int) -> Check:
    """Whether Ray's shared memory, all nodes together, holds what the stream may hold."""
    room = int(ray.cluster_resources().get("object_store_memory", 0))
    reason = (
        f"{room:,} bytes in the cluster's object store, {max_bytes_in_flight:,} may be in flight"
    )
    if room < max_bytes_in_flight:
        fix = "start Ray with a larger --object-store-memory, or lower stream.max_bytes_in_flight"
        return Check("object_store", "fail", reason, fix)
    return Check("object_store", "ok", reason)


def compare_versions(found: dict[str, dict[str, str]]) -> Check:
    """Whether the versions of all nodes (name -> package -> version) are equal."""
    first, *others = found.values()
    differing = sorted({key for other in others for key, _ in first.items() ^ other.items()})
    if not differing:
        said = ", ".join(f"{name} {version}" for name, version in first.items())
        return Check("versions", "ok", f"{len(found)} nodes: {said}")
    reasons = [
        f"{key} is " + ", ".join(f"{v.get(key, 'absent')} on {node}" for node, v in found.items())
        for key in differing
    ]
    return Check("versions", "fail", "; ".join(reasons), "use one image on every node")
