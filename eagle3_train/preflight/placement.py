"""Where engines and trainers would go, by Ray's rules: a replica sits on one node, a share of a GPU on one GPU.

Processes are placed in the order in which a job starts them, each on the first node with room and there on the
fullest GPU with room.
"""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass

import torch

from eagle3_train.config import JobConfig
from eagle3_train.preflight.check import Check

ASK = "describe the cluster in preflight.nodes, gpus_per_node and gpu_memory_bytes"
_EPS = 1e-6


@dataclass(frozen=True, slots=True)
class Cluster:
    """What a job can have. nodes: (GPUs, CPUs) of each; gpu_memory: bytes of one GPU; None where nobody said."""

    nodes: tuple[tuple[int, float | None], ...] | None
    gpu_memory: int | None


@dataclass(frozen=True, slots=True)
class Placement:
    """gpus: (engines, trainers) on each GPU; waiting: engines and trainers that find no room."""

    gpus: tuple[tuple[int, int], ...]
    waiting: tuple[int, int]


@dataclass(slots=True)
class _Gpu:
    free: float = 1.0
    engines: int = 0
    trainers: int = 0


@dataclass(slots=True)
class _Node:
    gpus: list[_Gpu]
    cpus: float

    def take(self, share: float, times: int, cpus: float) -> list[_Gpu] | None:
        """The GPUs of a process that now sits here, with `times` shares (or whole GPUs); None without room."""
        each, count = min(1.0, share), math.ceil(times * max(1.0, share)) if share else 0
        fullest_first = sorted(self.gpus, key=lambda gpu: gpu.free)
        taken = [gpu for gpu in fullest_first if gpu.free >= each - _EPS][:count]
        if cpus > self.cpus + _EPS or len(taken) < count:
            return None
        self.cpus -= cpus
        for gpu in taken:
            gpu.free -= each
        return taken


def cluster_of(config: JobConfig) -> Cluster:
    """The connected Ray cluster, else what the configuration says of it, else this machine when it has GPUs."""
    count, memory = config.preflight.gpus_per_node, config.preflight.gpu_memory_bytes
    here = torch.cuda.device_count()
    if memory is None and here:
        memory = torch.cuda.get_device_properties(0).total_memory
    if "ray" in sys.modules:  # else nothing can be connected, and the import takes seconds
        from eagle3_train.preflight.nodes import connected_nodes

        if nodes := connected_nodes():
            return Cluster(nodes, memory)
    if count is None and not here:
        return Cluster(None, memory)
    return Cluster(((here if count is None else count, None),) * config.preflight.nodes, memory)


def place(config: JobConfig, cluster: Cluster) -> Placement | None:
    """Every engine, then every trainer; None when the nodes are unknown."""
    if cluster.nodes is None:
        return None
    nodes = [
        _Node([_Gpu() for _ in range(gpus)], math.inf if cpus is None else cpus)
        for gpus, cpus in cluster.nodes
    ]
    engine, train = config.engine, config.train

    def start(share: float, times: int, cpus: float) -> list[_Gpu] | None:
        taken = (node.take(share, times, cpus) for node in nodes)
        return next((found for found in taken if found is not None), None)

    ranks, share = engine.tensor_parallel, engine.gpus_per_worker
    engines = [start(share, ranks, engine.cpus) for _ in range(engine.replicas)]
    trainers = [
        start(train.gpus_per_worker, 1, train.cpus_per_worker) for _ in range(train.workers)
    ]
    for gpu in (gpu for found in engines for gpu in found or ()):
        gpu.engines += 1
    for gpu in (gpu for found in trainers for gpu in found or ()):
        gpu.trainers += 1
    occupied = tuple((gpu.engines, gpu.trainers) for node in nodes for gpu in node.gpus)
    return Placement(occupied, (engines.count(None), trainers.count(None)))


def check(config: JobConfig, cluster: Cluster, placed: Placement | None) -> Check:
    """Whether every engine and trainer finds room."""
    engine, train = config.engine, config.train
    for name, share, workers in (
        ("engine", engine.gpus_per_worker, engine.tensor_parallel),
        ("train", train.gpus_per_worker, 1),
    ):
        if share % 1 and share > 1:
            reason = f"{name}.gpus_per_worker={share:g}: a share is at most one GPU"
            return Check("placement", "fail", reason, "use whole GPUs")
        if workers > 1 and 0 < share <= 0.5:
            reason = f"{name}.gpus_per_worker={share:g} with engine.tensor_parallel={workers}: two ranks would meet on a GPU"
            return Check("placement", "fail", reason, "give each rank more than half a GPU")
    per_replica = engine.tensor_parallel * engine.gpus_per_worker
    needs = (
        f"{engine.replicas} engines of {per_replica:g} GPUs and {engine.cpus:g} CPUs, {train.workers} trainers "
        f"of {train.gpus_per_worker:g} and {train.cpus_per_worker:g}"
    )
    if cluster.nodes is None or placed is None:
        if per_replica or train.gpus_per_worker:
            return Check("placement", "warn", f"{needs}; the nodes are not known", ASK)
        return Check("placement", "ok", f"{needs}: on CPU")
    kinds = {node: cluster.nodes.count(node) for node in cluster.nodes}
    have = ", ".join(
        f"{count} x {gpus} GPUs" + (f" and {cpus:g} CPUs" if cpus is not None else "")
        for (gpus, cpus), count in kinds.items()
    )
    if any(placed.waiting):
        waits = f"{placed.waiting[0]} engines and {placed.waiting[1]} trainers find no room"
        fix = (
            "lower engine.tensor_parallel, engine.replicas, train.workers or CPUs, choose shares that add up to 1 on a "
            "GPU, or add nodes"
        )
        return Check("placement", "fail", f"{needs}; nodes: {have}: {waits}", fix)
    return Check("placement", "ok", f"{needs}; nodes: {have}")
