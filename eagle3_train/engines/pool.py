"""The engine replicas of a job: started, leased, replaced, given back.

lease      callers            a live replica                least loaded first, by tokens
failed     callers            nothing                       the others go on; a new replica is started
close      the job            replicas to stop              what is left of them is killed

A replica is one actor that reserves all its GPUs, hence on one node. Ray gives an actor a part of one GPU only, so an
engine that shares several with trainers reserves each through a `GpuShare` and is shown these GPUs. There are no
placement groups: when a node dies, Ray 2.60 tries to place its groups again without pause, and nothing else meanwhile.
"""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError, RayTaskError

from eagle3_train.config import EngineConfig, JobConfig
from eagle3_train.engines.launch import EngineError
from eagle3_train.engines.replica import EngineReplica
from eagle3_train.engines.spec import EngineSpec, Purpose
from eagle3_train.records import EngineFacts
from eagle3_train.stream.nodes import here, on
from eagle3_train.target.facts import read_facts, resolve_boundaries

log = logging.getLogger(__name__)

REPLICA_THREADS = 64
POOL_THREADS = 128
FIRST_WORD_S = 5.0
CLOSE_TIMEOUT_S = 30.0
# vLLM and torch greet on every start; what matters reaches us as an EngineError. Spinning OpenMP threads
# would stall whatever shares the cores.
ENVIRONMENT = {
    "OMP_WAIT_POLICY": "PASSIVE",
    "PYTHONWARNINGS": "ignore::FutureWarning,ignore::DeprecationWarning",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
}


def spec_for(
    config: JobConfig, purpose: Purpose, boundaries: tuple[int, ...] = (), drafter: str = ""
) -> EngineSpec:
    """The engine a job needs for `purpose`; a checkpoint for "serve", boundaries for "capture" (() are the drafter's)."""
    if purpose == "capture" and not boundaries:
        facts = read_facts(config.target.path)
        boundaries = resolve_boundaries(config.drafter.aux_layers, facts.num_layers)
    return EngineSpec(
        config.target,
        config.engine,
        purpose=purpose,
        boundaries=boundaries,
        drafter=drafter,
        num_speculative_tokens=config.evaluate.num_speculative_tokens if purpose == "serve" else 0,
        seed=config.rollout.seed,
        capture_dtype=config.stream.dtype,
        pack_tokens=config.stream.tokens_per_pack,
    )


@contextmanager
def engine_pool(spec: EngineSpec) -> Iterator[Any]:
    """Handle of a pool whose replicas are ready, while the block runs; says ever more rarely what it waits for.

    Raises EngineError when the cluster is too small or an engine cannot start; nothing is left behind.
    """
    actor = ray.remote(**here(), max_concurrency=POOL_THREADS)(EnginePool)
    pool = actor.remote(spec)
    try:
        facts = _wait_until_ready(pool)
        log.info(
            "engines: %d x %s (%s, %s) ready in %.0f s",
            spec.engine.replicas, facts.resolved_class, facts.engine, facts.dtype, facts.start_s,
        )  # fmt: skip
        yield pool
    finally:
        with suppress(RayError):
            ray.get(pool.close.remote(), timeout=2 * CLOSE_TIMEOUT_S)
        ray.kill(pool)


def _wait_until_ready(pool: Any) -> EngineFacts:
    starting, pause = pool.start.remote(), FIRST_WORD_S
    while not ray.wait([starting], timeout=pause)[0]:
        log.info("engines: %s", ray.get(pool.status.remote()))
        pause *= 2
    try:
        facts: EngineFacts = ray.get(starting)
    except RayTaskError as error:
        raise EngineError(str(error.cause)) from error
    return facts


class GpuShare:
    """Actor that holds a part of one GPU."""

    def where(self) -> tuple[str, str]:
        """Node and GPU."""
        return ray.get_runtime_context().get_node_id(), str(ray.get_gpu_ids()[0])


@dataclass(slots=True)
class _Replica:
    """One replica: waiting for room or loading until `facts` is there. actors: the engine, after its shares."""

    actors: list[Any] = field(default_factory=list)
    facts: EngineFacts | None = None
    load_tokens: int = 0

    @property
    def handle(self) -> Any:
        """The engine's actor."""
        return self.actors[-1]

    def kill(self) -> None:
        """Kill what is left of it."""
        for actor in self.actors:
            ray.kill(actor)


class EnginePool:
    """Thread-safe; runs as a Ray actor (`engine_pool`)."""

    def __init__(self, spec: EngineSpec) -> None:
        self._spec = spec
        self._engine = spec.engine
        self._changed = threading.Condition()
        self._replicas: dict[int, _Replica] = {}
        self._ids = itertools.count()
        self._replacements = 0
        self._error: EngineError | None = None

    def start(self) -> EngineFacts:
        """Start every replica side by side; facts of one. Raises EngineError."""
        self._check_cluster()
        with self._changed:
            for _ in range(self._engine.replicas):
                self._launch()
            self._wait_for(self._engine.replicas)
            return next(r.facts for r in self._replicas.values() if r.facts)

    def status(self) -> str:
        """One line: how many replicas are ready and what the others may wait for."""
        with self._changed:
            ready = len(self._ready())
        need = _resources(self._engine)
        return (
            f"{ready}/{self._engine.replicas} replicas ready; the others load, or wait for {need} "
            f"(free: {_free(need)})"
        )

    def lease(self, cost_tokens: int) -> tuple[int, Any]:
        """(id, handle) of the least loaded replica; waits while all are being replaced."""
        with self._changed:
            self._wait_for(1)
            ready = self._ready()
            chosen = min(ready, key=lambda i: (ready[i].load_tokens, i))
            ready[chosen].load_tokens += cost_tokens
            return chosen, ready[chosen].handle

    def release(self, replica_id: int, cost_tokens: int) -> None:
        """The leased work is over, well or badly."""
        with self._changed:
            if replica_id in self._replicas:
                self._replicas[replica_id].load_tokens -= cost_tokens

    def failed(self, replica_id: int) -> None:
        """A replica is dead: replace it while the others go on. Reported twice, it is replaced once."""
        with self._changed:
            replica = self._replicas.pop(replica_id, None)
            if replica is None:
                return
            replica.kill()
            self._replacements += 1
            if self._replacements > self._engine.max_replacements:
                self._give_up(
                    f"{self._replacements} engine replicas have died, engine.max_replacements="
                    f"{self._engine.max_replacements}; the replicas' logs say why"
                )
                return
            log.warning(
                "engine replica %d died; replacement %d of at most %d starts",
                replica_id, self._replacements, self._engine.max_replacements,
            )  # fmt: skip
            self._launch()

    def handles(self) -> dict[int, Any]:
        """Every ready replica, by id."""
        with self._changed:
            return {i: replica.handle for i, replica in self._ready().items()}

    def replacements(self) -> int:
        """Replicas that have died so far."""
        return self._replacements

    def close(self) -> None:
        """Stop replicas, then kill what is left of them."""
        with self._changed:
            closing = [replica.handle.close.remote() for replica in self._ready().values()]
            replicas, self._replicas = list(self._replicas.values()), {}
            self._give_up("the engine pool was closed")
        if closing:
            ray.wait(closing, num_returns=len(closing), timeout=CLOSE_TIMEOUT_S)
        for replica in replicas:
            replica.kill()

    # Details; the caller holds the lock.

    def _ready(self) -> dict[int, _Replica]:
        return {i: replica for i, replica in self._replicas.items() if replica.facts}

    def _wait_for(self, count: int) -> None:
        """Wait until `count` replicas are ready. Raises EngineError when the pool has given up."""
        self._changed.wait_for(lambda: self._error or len(self._ready()) >= count)
        if self._error:
            raise self._error

    def _give_up(self, reason: str) -> None:
        """Whoever waits for a replica is told the first reason."""
        self._error = self._error or EngineError(reason)
        self._changed.notify_all()

    def _launch(self) -> None:
        """Start one replica in the background."""
        replica_id, replica = next(self._ids), _Replica()
        self._replicas[replica_id] = replica
        threading.Thread(target=self._bring_up, args=(replica_id, replica), daemon=True).start()

    # A replica's own thread.

    def _bring_up(self, replica_id: int, replica: _Replica) -> None:
        """Wait for room and for the engine. A replacement that fails is done without while others live."""
        try:
            facts = self._load(replica)
        except Exception as error:  # noqa: BLE001 - raised by start() or lease()
            # Ray puts the traceback of the engine's process before what it said.
            reason = str(error).rpartition("EngineError:")[2].strip()
            with self._changed:
                replica.kill()
                if self._replicas.pop(replica_id, None) is None:
                    return
                if replica_id >= self._engine.replicas and self._ready():
                    log.warning("no replacement, %d replicas go on: %s", len(self._ready()), reason)
                else:
                    self._give_up(reason)
            return
        with self._changed:
            replica.facts = facts
            self._changed.notify_all()

    def _load(self, replica: _Replica) -> EngineFacts:
        need, timeout_s = _resources(self._engine), self._engine.start_timeout_s
        environment = ENVIRONMENT | {"OMP_NUM_THREADS": str(max(1, int(self._engine.cpus)))}
        try:
            options: dict[str, Any] = {"num_gpus": need.get("GPU", 0)}
            if self._shares_gpus():
                node, gpus = self._reserve_shares(replica, timeout_s)
                environment["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
                options = on(node)
            actor = ray.remote(EngineReplica).options(
                **options
                | {
                    "num_cpus": need["CPU"],
                    "max_concurrency": REPLICA_THREADS,
                    "runtime_env": {"env_vars": environment},
                }
            )
            replica.actors.append(actor.remote(self._spec))
            facts: EngineFacts = ray.get(replica.handle.facts.remote(), timeout=timeout_s)
        except GetTimeoutError:
            raise EngineError(
                f"an engine was not ready within engine.start_timeout_s={timeout_s:.0f}; it needs {need}, free now: "
                f"{_free(need)}. Raise it, stop what else runs on the cluster, or lower engine.replicas, "
                "engine.cpus or engine.gpus_per_worker"
            ) from None
        return facts

    def _shares_gpus(self) -> bool:
        return self._engine.tensor_parallel > 1 and 0 < self._engine.gpus_per_worker < 1

    def _reserve_shares(self, replica: _Replica, timeout_s: float) -> tuple[str, list[str]]:
        """A share of a GPU for every rank, all on one node: that node, and the GPUs."""
        share = {"num_cpus": 0, "num_gpus": self._engine.gpus_per_worker}
        replica.actors.append(ray.remote(GpuShare).options(**share).remote())
        node, first = ray.get(replica.actors[0].where.remote(), timeout=timeout_s)
        for _ in range(self._engine.tensor_parallel - 1):
            replica.actors.append(ray.remote(GpuShare).options(**on(node) | share).remote())
        places = ray.get([actor.where.remote() for actor in replica.actors[1:]], timeout=timeout_s)
        return node, [first, *(gpu for _, gpu in places)]

    def _check_cluster(self) -> None:
        """Refuse at once what the cluster can never hold."""
        need = _resources(self._engine)
        total = ray.cluster_resources()
        for name, amount in need.items():
            wanted = amount * self._engine.replicas
            if wanted > total.get(name, 0):
                raise EngineError(
                    f"{self._engine.replicas} engine replicas need {wanted:g} {name}, the cluster has "
                    f"{total.get(name, 0):g}; lower engine.replicas, engine.cpus or "
                    "engine.gpus_per_worker, or start a larger cluster"
                )


def _resources(engine: EngineConfig) -> dict[str, float]:
    """What one replica reserves; its tensor-parallel workers share it, hence the node."""
    need = {"CPU": engine.cpus}
    if engine.gpus_per_worker:
        if engine.gpus_per_worker <= 0.5 and engine.tensor_parallel > 1:
            raise EngineError(
                f"engine.gpus_per_worker={engine.gpus_per_worker} with engine.tensor_parallel="
                f"{engine.tensor_parallel}: Ray would put two ranks on one GPU; give each more than half of one"
            )
        need["GPU"] = engine.gpus_per_worker * engine.tensor_parallel
    return need


def _free(need: dict[str, float]) -> dict[str, float]:
    available = ray.available_resources()
    return {name: available.get(name, 0.0) for name in need}
