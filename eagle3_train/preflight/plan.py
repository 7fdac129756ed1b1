"""Arithmetic depth: bytes, memory, placement, disk and hours. Facts and configuration in, numbers and checks out.

Sizes marked "about" are estimates: weights from shapes when no checkpoint is at hand, activations from the rows a
pack can have. Everything else is exact.
"""

from __future__ import annotations

import logging
import math
import os
import shutil
import tempfile
from collections import Counter
from pathlib import Path

from eagle3_train.config import JobConfig
from eagle3_train.drafter.checkpoint_format import expected_tensors
from eagle3_train.drafter.spec import DrafterSpec
from eagle3_train.preflight import placement
from eagle3_train.preflight.check import Check
from eagle3_train.preflight.placement import cluster_of, place
from eagle3_train.target.derive import drafter_spec
from eagle3_train.target.facts import TargetFacts, bytes_per_token, resolve_boundaries

# Largest job package that `ray job submit` takes.
UPLOAD_LIMIT = 100 * 1024**2
# CUDA context, workspaces, NCCL buffers of one engine process.
_ENGINE_OVERHEAD = 3 * 1024**3


class Plan:
    """Numbers of a run, in bytes and tokens; per GPU or worker where it says so. What depends on an unknown is None."""

    def __init__(self, config: JobConfig, facts: TargetFacts) -> None:
        """Raises ValueError when target and drafter do not go together."""
        spec = drafter_spec(facts, config.drafter)
        engine, train = config.engine, config.train
        taps = len(resolve_boundaries(config.drafter.aux_layers, facts.num_layers))
        self.cluster = cluster_of(config)
        self.placed = place(config, self.cluster)

        self.bytes_per_token = row = bytes_per_token(facts.hidden_size, taps, config.stream.dtype)
        self.window_bytes = train.workers * train.accumulation * config.stream.tokens_per_pack * row
        self.samples = config.preflight.samples or config.corpus.limit
        self.mean_tokens = config.preflight.mean_tokens or config.corpus.max_len
        tokens = self.samples and self.samples * self.mean_tokens
        self.dump_bytes = tokens and tokens * row

        itemsize = _itemsize(engine.dtype)
        self.weights_per_gpu = _weight_bytes(facts, itemsize) // engine.tensor_parallel
        self.kv_per_token = _kv_per_token(facts, engine.tensor_parallel, itemsize)
        self.states_per_token = facts.hidden_size * taps * itemsize
        fixed = self.weights_per_gpu + _engine_working_bytes(config, facts, itemsize)
        room = int((self.cluster.gpu_memory or 0) * engine.gpu_memory_utilization) - fixed
        cache = engine.kv_cache_bytes or max(room, 0)
        self.engine_per_gpu = fixed + cache
        self.kv_tokens = cache // (self.kv_per_token + self.states_per_token)

        parameters = sum(math.prod(shape) for shape in expected_tensors(spec).values())
        training = _trainer_bytes(config, facts, spec, parameters, row)
        self.drafter_parameters = parameters
        self.optimiser_per_worker, self.activations_per_worker, _ = training
        self.trainer_per_worker = sum(training)
        self.checkpoint_bytes = (train.keep_checkpoints + 1) * 12 * parameters

        cached = min(1.0, config.stream.cache_bytes / (tokens * row)) if tokens else 0.0
        captures = 1 + (train.epochs // config.stream.replay - 1) * (1 - cached)
        rates = config.preflight
        self.capture_hours = _hours(tokens, captures, rates.capture_tokens_per_s, engine.replicas)
        self.train_hours = _hours(tokens, train.epochs, rates.train_tokens_per_s, train.workers)


def plan_checks(
    config: JobConfig, facts: TargetFacts, plan: Plan, package: Path | None
) -> list[Check]:
    """Every arithmetic check; `package` is the directory that `ray job submit` would upload, if it is still to be."""
    return [
        _dump(config, plan),
        _stream(config, plan),
        placement.check(config, plan.cluster, plan.placed),
        _engine_memory(config, facts, plan),
        _trainer_memory(config, plan),
        _disk(config, plan),
        *([_package(package)] if package else []),
        _rates(config, plan),
    ]


def _weight_bytes(facts: TargetFacts, itemsize: int) -> int:
    """Bytes of the target's weights as the engine holds them; quantised ones stay as they are stored."""
    if facts.weight_bytes is None:
        return estimated_weight_bytes(facts, itemsize)
    stored = itemsize if facts.quantisation else _itemsize(facts.dtype)
    return facts.weight_bytes * itemsize // stored


def estimated_weight_bytes(facts: TargetFacts, plain: int = 2) -> int:
    """Bytes of the target's weights from its shapes, `plain` for one that is not quantised.

    Routed experts carry the quantisation, fp8 all matrices.
    """
    hidden, layers = facts.hidden_size, facts.num_layers
    packed = facts.quantised_bits / 8 if facts.quantised_bits else plain
    if facts.mla is None:
        attention = hidden * facts.head_dim * 2 * (facts.num_heads + facts.num_kv_heads)
    else:
        m, heads = facts.mla, facts.num_heads
        queries = heads * (m.qk_nope_head_dim + m.qk_rope_head_dim)
        rank = m.q_lora_rank
        attention = (hidden + queries) * rank if rank else hidden * queries
        attention += hidden * (m.kv_lora_rank + m.qk_rope_head_dim)
        attention += m.kv_lora_rank * heads * (m.qk_nope_head_dim + m.v_head_dim)
        attention += heads * m.v_head_dim * hidden
    experts = shared = 0
    dense = 3 * hidden * facts.intermediate_size
    if facts.moe is not None:
        expert = 3 * hidden * facts.moe.intermediate_size
        experts, shared = expert * facts.moe.num_experts, expert * facts.moe.num_shared_experts
        dense = 0
    everywhere = packed if facts.moe is None or facts.quantisation == "fp8" else plain
    embeddings = facts.vocab_size * hidden * (1 if facts.tie_word_embeddings else 2)
    matrices = layers * ((attention + dense + shared) * everywhere + experts * packed)
    return int(matrices + embeddings * plain)


def package_bytes(directory: Path) -> int:
    """Bytes of the package that `ray job submit --working-dir` would upload, by Ray's own walk: it follows links."""
    # Here, since Ray takes a while to import. It has no public function for this (2.60).
    from ray._private.ray_constants import get_runtime_env_default_excludes
    from ray._private.runtime_env.packaging import _dir_travel, _get_excludes

    found: list[Path] = []
    left_out = [_get_excludes(directory, get_runtime_env_default_excludes())]
    quiet = logging.Logger("preflight", logging.ERROR)
    _dir_travel(directory.absolute(), left_out, found.append, include_gitignore=True, logger=quiet)
    return sum(path.stat().st_size for path in found if path.is_file())


def _itemsize(dtype: str) -> int:
    return 4 if dtype == "float32" else 2


def _kv_per_token(facts: TargetFacts, tp: int, itemsize: int) -> int:
    """KV-cache bytes of one token on one GPU; MLA's latent is replicated, heads are divided."""
    if facts.mla is not None:
        width = facts.mla.kv_lora_rank + facts.mla.qk_rope_head_dim
    else:
        width = 2 * max(1, facts.num_kv_heads // tp) * facts.head_dim
    return facts.num_layers * width * itemsize


def _engine_working_bytes(config: JobConfig, facts: TargetFacts, itemsize: int) -> int:
    tokens = config.engine.max_num_batched_tokens or max(8192, config.engine.max_model_len)
    width = 8 * facts.hidden_size + 4 * facts.intermediate_size // config.engine.tensor_parallel
    logits = config.engine.max_num_seqs * facts.vocab_size * 4
    return _ENGINE_OVERHEAD + tokens * width * itemsize + logits


def _trainer_bytes(
    config: JobConfig, facts: TargetFacts, spec: DrafterSpec, parameters: int, row: int
) -> tuple[int, int, int]:
    """(masters, Adam, gradients over the workers and a compute copy; activations and states; frozen tensors)."""
    train, itemsize = config.train, _itemsize(config.train.dtype)
    states = 16 * parameters // train.workers + itemsize * parameters
    frozen = 2 * facts.vocab_size * facts.hidden_size * itemsize
    width = 8 * spec.hidden_size + 3 * spec.intermediate_size + 2 * spec.num_heads * spec.head_dim
    activations = config.stream.tokens_per_pack * train.ttt_steps * width * itemsize
    logits = 4 * 2048 * (spec.draft_vocab_size + facts.vocab_size)
    return states, activations + logits + 2 * config.stream.tokens_per_pack * row, frozen


def _hours(tokens: int | None, times: float, rate: float | None, workers: int) -> float | None:
    return tokens * times / (rate * workers) / 3600 if tokens and rate else None


def _dump(config: JobConfig, plan: Plan) -> Check:
    budget = _size(config.stream.max_bytes_in_flight)
    reason = f"{plan.bytes_per_token / 1024:g} KiB per token; the stream holds {budget}; "
    if plan.samples is None or plan.dump_bytes is None:
        reason += "how many samples there are is not known (preflight.samples)"
    else:
        samples = f"{plan.samples:,} samples x {plan.mean_tokens:,} tokens"
        reason += f"a full dump of {samples} would weigh {_size(plan.dump_bytes)}"
    return Check("bytes_per_token", "ok", reason)


def _stream(config: JobConfig, plan: Plan) -> Check:
    window, budget = plan.window_bytes, config.stream.max_bytes_in_flight
    reason = f"one optimiser window is {_size(window)}, the budget {_size(budget)}"
    if budget < window:
        fix = f"set stream.max_bytes_in_flight to {window} or more, or make the window smaller"
        return Check("stream_budget", "fail", f"{reason}: it could never be filled", fix)
    if budget < 2 * window:
        fix = f"{2 * window} lets capture work while a window trains"
        return Check("stream_budget", "warn", reason, fix)
    return Check("stream_budget", "ok", reason)


def _engine_memory(config: JobConfig, facts: TargetFacts, plan: Plan) -> Check:
    if not config.engine.gpus_per_worker:
        return Check("engine_memory", "ok", f"weights {_size(plan.weights_per_gpu)} in host memory")
    about = "" if facts.weight_bytes else "about "
    reason = (
        f"weights {about}{_size(plan.weights_per_gpu)} per GPU, KV {plan.kv_per_token / 1024:.0f} KiB + states "
        f"{plan.states_per_token / 1024:.0f} KiB per token"
    )
    memory = plan.cluster.gpu_memory
    if memory is None or plan.placed is None:
        return Check("engine_memory", "warn", f"{reason}; the GPU is not known", placement.ASK)
    share = memory * config.engine.gpu_memory_utilization
    reason += f": room for {plan.kv_tokens:,} tokens in {_size(share)} of {_size(memory)}"
    fix = "raise engine.tensor_parallel or engine.gpu_memory_utilization, or lower engine.max_model_len"
    if plan.kv_tokens < config.engine.max_model_len or plan.engine_per_gpu > share:
        return Check("engine_memory", "fail", reason, fix)
    together = max((engines for engines, _ in plan.placed.gpus), default=0)
    if together > 1:
        reason += f"; {together} engines on a GPU take {_size(together * plan.engine_per_gpu)}"
    if together * plan.engine_per_gpu > memory:
        fix = "lower engine.gpu_memory_utilization, or raise engine.gpus_per_worker"
        return Check("engine_memory", "fail", reason, fix)
    return Check("engine_memory", "ok", reason)


def _trainer_memory(config: JobConfig, plan: Plan) -> Check:
    need = plan.trainer_per_worker
    reason = (
        f"about {_size(need)} per worker for a drafter of {plan.drafter_parameters / 1e6:,.0f} M parameters: "
        f"{_size(plan.optimiser_per_worker)} weights and optimiser, {_size(plan.activations_per_worker)} "
        "activations and states, the rest the target's embedding and head"
    )
    if not config.train.gpus_per_worker:
        return Check("trainer_memory", "ok", f"{reason}, in host memory")
    memory = plan.cluster.gpu_memory
    if memory is None or plan.placed is None:
        return Check("trainer_memory", "warn", f"{reason}; the GPU is not known", placement.ASK)
    spare = [
        (memory - engines * plan.engine_per_gpu - trainers * need, engines, trainers)
        for engines, trainers in plan.placed.gpus
        if trainers
    ]
    left, engines, trainers = min(spare, default=(memory - need, 0, 1))
    reason += f"; {trainers} on a GPU of {_size(memory)}"
    if engines:
        reason += f" beside {engines} engines"
    if left < 0:
        fix = (
            "lower stream.tokens_per_pack or engine.gpu_memory_utilization, use more train.workers, or raise "
            "train.gpus_per_worker"
        )
        return Check("trainer_memory", "fail", f"{reason}: {_size(-left)} too much", fix)
    return Check("trainer_memory", "ok", f"{reason}: {_size(left)} left")


def _disk(config: JobConfig, plan: Plan) -> Check:
    runs = place = config.runs_dir
    while not place.exists():
        place = place.parent
    wanted = [("checkpoints need", place, plan.checkpoint_bytes)]
    if cache := config.stream.cache_bytes // config.preflight.nodes:
        folder = Path(config.stream.cache_dir or tempfile.gettempdir())
        wanted.append(("a node's cache needs", folder, cache))
    said: list[str] = []
    taken = Counter[int]()  # of each disk
    for what, folder, need in wanted:
        if not (folder.is_dir() and os.access(folder, os.W_OK)):
            reason = f"{what} a directory, {folder} is none that can be written"
            return Check("disk", "fail", reason, "set runs_dir or stream.cache_dir to another")
        free, disk = shutil.disk_usage(folder).free, folder.stat().st_dev
        said.append(f"{what} {_size(need)}, {_size(free)} free at {folder}")
        taken[disk] += need
        if taken[disk] > free:
            fix = "lower train.keep_checkpoints or stream.cache_bytes, or move runs_dir or stream.cache_dir"
            return Check("disk", "fail", "; ".join(said), fix)
    if place not in (runs, runs.parent):
        said.append(f"{runs} does not exist here")
        return Check("disk", "warn", "; ".join(said), "make sure that every node sees runs_dir")
    return Check("disk", "ok", "; ".join(said))


def _package(directory: Path) -> Check:
    size, limit = package_bytes(directory), UPLOAD_LIMIT
    reason = f"the job package is {_size(size)}, the upload limit {_size(limit)}"
    if size > limit:
        fix = "list large files in .gitignore, or exclude them with --runtime-env-json"
        return Check("package_size", "fail", reason, fix)
    return Check("package_size", "ok", reason)


def _rates(config: JobConfig, plan: Plan) -> Check:
    rate = config.preflight.capture_tokens_per_s
    known = {"capture": plan.capture_hours, "training": plan.train_hours}
    parts = ", ".join(f"{what} {h:.2f} h" for what, h in known.items() if h is not None)
    if rate is None or plan.capture_hours is None or plan.train_hours is None:
        given = config.preflight.model_dump() | {"samples": plan.samples}
        names = ("capture_tokens_per_s", "train_tokens_per_s", "samples")
        missing = ", ".join(f"preflight.{name}" for name in names if given[name] is None)
        return Check("rates", "ok", f"{parts or 'no hours'}; the rest is predicted from {missing}")
    engine, train = config.engine, config.train
    gpus = engine.replicas * engine.tensor_parallel * engine.gpus_per_worker
    gpus += train.workers * train.gpus_per_worker
    longer, slower = max((plan.train_hours, "training"), (plan.capture_hours, "capture"))
    reason = (
        f"{parts}, together about {longer:.2f} h: {slower} is the bottleneck; {longer * gpus:.1f} GPU-hours; an engine "
        f"hands over up to {_size(rate * plan.bytes_per_token)} of states a second"
    )
    return Check("rates", "ok", reason)


def _size(count: float) -> str:
    """Bytes as people say them (decimal, like disks and links)."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(count) < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"
