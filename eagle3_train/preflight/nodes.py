"""Whether the connected cluster fits: the same versions on every node (one small task each), room for the stream."""

from __future__ import annotations

import ray

from eagle3_train.preflight.check import Check
from eagle3_train.provenance import versions
from eagle3_train.stream.nodes import on


def node_versions() -> Check:
    """Ask every alive node of the connected cluster."""
    nodes = [node for node in ray.nodes() if node["Alive"]]
    ask = ray.remote(versions)
    answers = ray.get([ask.options(**on(node["NodeID"])).remote() for node in nodes])
    names = [f"{node['NodeManagerAddress']} ({node['NodeID'][:6]})" for node in nodes]
    return compare_versions(dict(zip(names, answers, strict=True)))


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
