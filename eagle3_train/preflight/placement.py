"""Where engines and trainers would go, by Ray's rules: a replica sits on one node, a share of a GPU on one GPU.

Processes are placed in the order in which a job starts them, each on the first node with room and there on the
fullest GPU with room.
"""

from __future__ import annotations

import math
import sys
from collections import Counter
from dataclasses import dataclass, field

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
    holds: Counter[str] = field(default_factory=Counter)


@dataclass(slots=True)
class _Node:
    gpus: list[_Gpu]
    cpus: float


def cluster_of(config: JobConfig) -> Cluster:
    """The connected Ray cluster, else what the configuration says of it, else this machine when it has GPUs."""
    count, memory = config.preflight.gpus_per_node, config.preflight.gpu_memory_bytes
    here = torch.cuda.device_count()
    if memory is None and here:
        memory = torch.cuda.get_device_properties(0).total_memory
    if "ray" in sys.modules:  # else nothing can be connected, and the import takes seconds
        import ray

        if ray.is_initialized():
            alive = [node["Resources"] for node in ray.nodes() if node["Alive"]]
            has = tuple((int(node.get("GPU", 0)), node.get("CPU", 0.0)) for node in alive)
            return Cluster(has, memory)
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
    waiting: Counter[str] = Counter()

    def start(kind: str, share: float, times: int, cpus: float) -> None:
        """Take `times` shares (or whole GPUs) of a node."""
        each, count = min(1.0, share), math.ceil(times * max(1.0, share)) if share else 0
        for node in nodes:
            fullest_first = sorted(node.gpus, key=lambda gpu: gpu.free)
            fitting = [gpu for gpu in fullest_first if gpu.free >= each - _EPS][:count]
            if cpus <= node.cpus + _EPS and len(fitting) == count:
                node.cpus -= cpus
                for gpu in fitting:
                    gpu.free -= each
                    gpu.holds[kind] += 1
                return
        waiting[kind] += 1

    engine, train = config.engine, config.train
    for _ in range(engine.replicas):
        start("engine", engine.gpus_per_worker, engine.tensor_parallel, engine.cpus)
    for _ in range(train.workers):
        start("trainer", train.gpus_per_worker, 1, train.cpus_per_worker)
    on_gpus = [gpu.holds for node in nodes for gpu in node.gpus]
    return Placement(
        tuple((holds["engine"], holds["trainer"]) for holds in on_gpus),
        (waiting["engine"], waiting["trainer"]),
    )


def check(config: JobConfig, cluster: Cluster, placed: Placement | None) -> Check:
    """Whether every engine and trainer finds room."""
    engine, train = config.engine, config.train
    ranks, share = engine.tensor_parallel, engine.gpus_per_worker
    for name, gpus in (("engine", share), ("train", train.gpus_per_worker)):
        if gpus > 1 and gpus % 1:
            reason = f"{name}.gpus_per_worker={gpus:g}: a share is at most one GPU"
            return Check("placement", "fail", reason, "use whole GPUs")
    if ranks > 1 and 0 < share <= 0.5:
        reason = f"engine.gpus_per_worker={share:g} with engine.tensor_parallel={ranks}: two ranks would meet on a GPU"
        return Check("placement", "fail", reason, "give each rank more than half a GPU")
    needs = (
        f"{engine.replicas} engines of {ranks * share:g} GPUs and {engine.cpus:g} CPUs, {train.workers} trainers "
        f"of {train.gpus_per_worker:g} and {train.cpus_per_worker:g}"
    )
    if cluster.nodes is None or placed is None:
        if share or train.gpus_per_worker:
            return Check("placement", "warn", f"{needs}; the nodes are not known", ASK)
        return Check("placement", "ok", f"{needs}: on CPU")
    have = ", ".join(
        f"{count} x {gpus} GPUs" + (f" and {cpus:g} CPUs" if cpus is not None else "")
        for (gpus, cpus), count in Counter(cluster.nodes).items()
    )
    if any(placed.waiting):
        waits = f"{placed.waiting[0]} engines and {placed.waiting[1]} trainers find no room"
        fix = (
            "lower engine.tensor_parallel, engine.replicas, train.workers or CPUs, choose shares that add up to 1 on a "
            "GPU, or add nodes"
        )
        return Check("placement", "fail", f"{needs}; nodes: {have}: {waits}", fix)
    return Check("placement", "ok", f"{needs}; nodes: {have}")
