"""Our training step on the benchmark's shapes, batches and weights."""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks import step_flops
from eagle3_train.drafter.checkpoint_format import expected_tensors
from eagle3_train.drafter.frozen import FrozenTarget
from eagle3_train.drafter.losses import LossOptions
from eagle3_train.drafter.matmul import Fp8Weight
from eagle3_train.drafter.model import Eagle3Drafter
from eagle3_train.drafter.rows import PackedBatch, RowPlan, assemble_plan, plan_rows
from eagle3_train.drafter.spec import DrafterSpec, MlaShape, RopeSpec
from eagle3_train.training.optim import AdamW

DECAY = 0.8
FAST = Fp8Weight.fast


@dataclass(frozen=True, slots=True)
class Shape:
    """A benchmark shape: drafter sizes, TTT steps, and the lengths of the documents of one batch."""

    name: str
    hidden: int
    inter: int
    heads: int
    kv_heads: int
    vocab: int
    draft_vocab: int
    theta: float
    ttt: int
    lengths: tuple[int, ...]
    head_dim: int = 128
    budget: int = 32768
    """Tokens of a pack, for us and for speculators; more documents make more packs, whose gradients a step accumulates.
    A power of two: speculators' mask at 12,032 tokens takes ptxas more than 390 s (torch 2.11)."""
    mla: tuple[int, int, int, int] | None = None
    """Ranks of queries, and of keys and values; rotated and value width of a head. None: Llama-style attention."""

    @property
    def spec(self) -> DrafterSpec:
        """The drafter of this shape."""
        latent = None
        if self.mla is not None:
            queries, keys, rotated, values = self.mla
            latent = MlaShape(queries, keys, self.head_dim - rotated, rotated, values)
        return DrafterSpec(
            hidden_size=self.hidden,
            intermediate_size=self.inter,
            num_heads=self.heads,
            num_kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            vocab_size=self.vocab,
            draft_vocab_size=self.draft_vocab,
            max_position_embeddings=max(self.lengths) + 64,
            rms_norm_eps=1e-6,
            rope=RopeSpec(theta=self.theta),
            mla=latent,
        )


def _ragged_lengths() -> tuple[int, ...]:
    """32 lengths of 64-4096 tokens, log-uniform."""
    draws = np.random.default_rng(0).uniform(np.log(64), np.log(4096), 32)
    return tuple(int(n) for n in np.exp(draws))


_LLAMA = Shape("llama8b", 4096, 14336, 32, 8, 128256, 32000, 500000.0, 7, (2048,) * 4)
_KIMI = Shape("kimi", 7168, 12288, 64, 64, 163840, 163840, 50000.0, 4, (4096,))
_RAGGED = replace(_LLAMA, name="ragged", lengths=_ragged_lengths(), budget=8192)
_LONG = replace(_KIMI, name="kimi-32k", lengths=(32768,))
_MLA = replace(
    _KIMI,
    name="kimi-mla",
    inter=18432,
    draft_vocab=32768,
    ttt=7,
    head_dim=192,
    mla=(1536, 512, 64, 128),
)  # what configs/kimi-k2.5.yaml trains
SHAPES = {shape.name: shape for shape in (_LLAMA, _KIMI, _RAGGED, _LONG, _MLA)}


def make_weights(shape: Shape, device: str, oov_scale: float = 0.05) -> dict[str, Tensor]:
    """Seeded weights under the exported names, plus target embedding, head, d2t and t2d.

    Generated on `device`, so every implementation measured on one machine gets the same values.
    """
    g = torch.Generator(device).manual_seed(1)
    h = shape.hidden

    def normal(*size: int, scale: float | None = None) -> Tensor:
        return torch.randn(*size, generator=g, device=device) * (scale or size[-1] ** -0.5)

    def ones(width: int = h) -> Tensor:
        return 1 + normal(width, scale=0.1)

    layer = "midlayer."
    attention = {
        name: size for name, size in expected_tensors(shape.spec).items() if ".self_attn." in name
    }
    out = {
        "embed_tokens.weight": normal(shape.vocab, h, scale=1.0).bfloat16(),
        "fc.weight": normal(h, 3 * h),
        "norm.weight": ones(),
        "lm_head.weight": normal(shape.draft_vocab, h),
        **{
            name: normal(*size) if len(size) > 1 else ones(*size)
            for name, size in attention.items()
        },
        f"{layer}mlp.gate_proj.weight": normal(shape.inter, h),
        f"{layer}mlp.up_proj.weight": normal(shape.inter, h),
        f"{layer}mlp.down_proj.weight": normal(h, shape.inter),
        f"{layer}hidden_norm.weight": ones(),
        f"{layer}input_layernorm.weight": ones(),
        f"{layer}post_attention_layernorm.weight": ones(),
    }
    ids = torch.randperm(shape.vocab, generator=g, device=device)[: shape.draft_vocab].sort().values
    out["t2d"] = torch.zeros(shape.vocab, dtype=torch.bool, device=device)
    out["t2d"][ids] = True
    out["d2t"] = ids - torch.arange(shape.draft_vocab, device=device)
    head = normal(shape.vocab, h, scale=0.5).bfloat16()
    head[~out["t2d"]] *= oov_scale  # the teacher's argmax is then in the draft vocabulary
    out["target_lm_head"] = head
    return {name: t.bfloat16() if t.is_floating_point() else t for name, t in out.items()}


def make_documents(shape: Shape, fraction: float, device: str) -> list[dict[str, Tensor]]:
    """ids [n], mask [n], aux [n, 3H], last [n, H] (post-norm) of each document; the last `fraction` is supervised."""
    g = torch.Generator(device).manual_seed(2)
    documents = []
    for n in shape.lengths:
        mask = torch.zeros(n, dtype=torch.long, device=device)
        mask[int(n * (1 - fraction)) : n - 1] = 1  # peers drop the last position, so ours does too
        documents.append(
            {
                "ids": torch.randint(3, shape.vocab, (n,), generator=g, device=device),
                "mask": mask,
                "aux": torch.randn(n, 3 * shape.hidden, generator=g, device=device).bfloat16(),
                "last": torch.randn(n, shape.hidden, generator=g, device=device).bfloat16(),
            }
        )
    return documents


def split_documents(
    shape: Shape, documents: list[dict[str, Tensor]]
) -> list[list[dict[str, Tensor]]]:
    """Packs of at most `shape.budget` tokens: each document, longest first, into the first pack with room."""
    packs: list[list[dict[str, Tensor]]] = []
    for document in sorted(documents, key=lambda d: -len(d["ids"])):
        for pack in packs:
            if sum(len(d["ids"]) for d in (*pack, document)) <= shape.budget:
                pack.append(document)
                break
        else:
            packs.append([document])
    return packs


def our_packs(shape: Shape, documents: list[dict[str, Tensor]]) -> list[PackedBatch]:
    """One step's packs, under our supervision rule."""
    return [_pack(shape, pack) for pack in split_documents(shape, documents)]


def _pack(shape: Shape, documents: list[dict[str, Tensor]]) -> PackedBatch:
    """One pack: states of x[:-1] of each document."""
    ids = [d["ids"].cpu().numpy() for d in documents]
    masks = [d["mask"].bool().cpu().numpy() for d in documents]
    aux, last = (torch.cat([d[key][:-1] for d in documents]) for key in ("aux", "last"))
    return PackedBatch(plan_rows(ids, masks, shape.ttt), aux, last)


def peer_rule_batch(shape: Shape, documents: list[dict[str, Tensor]]) -> PackedBatch:
    """The documents under SpecForge's and TorchSpec's rule: (k, t) is supervised iff mask[t + k]."""
    keys = ("depth", "context", "context_ids", "positions", "begin")
    parts: dict[str, list[np.ndarray]] = {key: [] for key in keys}
    hits, first_row, first = [], 0, 0
    for d in documents:
        mask = d["mask"].bool().cpu().numpy()
        ahead = np.stack([np.append(mask[k:], np.zeros(k, bool)) for k in range(shape.ttt)])
        depth = np.where(ahead.any(0), shape.ttt - np.argmax(ahead[::-1], 0), 0)
        kept = int(np.flatnonzero(depth)[-1]) + 1
        hits.append(ahead[:, :kept])
        parts["depth"].append(depth[:kept])
        parts["context"].append(first_row + np.arange(kept))
        parts["context_ids"].append(d["ids"].cpu().numpy()[1 : kept + 1])
        parts["positions"].append(np.arange(kept))
        parts["begin"].append(np.full(kept, first))
        first_row, first = first_row + len(mask), first + kept
    plan = assemble_plan(ttt_steps=shape.ttt, **{key: np.concatenate(parts[key]) for key in keys})
    ahead = np.concatenate(hits, 1)
    starts = plan.starts.numpy()
    weights = np.concatenate([ahead[k, starts[:n]] for k, n in enumerate(plan.counts)])
    plan = replace(plan, weights=torch.from_numpy(weights.astype(np.float32)))
    aux, last = (torch.cat([d[key] for d in documents]) for key in ("aux", "last"))
    return PackedBatch(plan, aux, last)


def build(
    shape: Shape, weights: dict[str, Tensor], device: str, dtype: torch.dtype, fp8: bool = False
) -> tuple[Eagle3Drafter, FrozenTarget]:
    """Drafter and target with these weights (named as `make_weights` does)."""
    drafter = Eagle3Drafter(shape.spec, torch.device(device), dtype, fp8)
    with torch.no_grad():
        for name, parameter in drafter.named_parameters():
            parameter.copy_(weights[name])
    full = shape.vocab == shape.draft_vocab
    target = FrozenTarget(
        embed=weights["embed_tokens.weight"],
        lm_head=weights["target_lm_head"],
        norm_weight=None,
        norm_eps=1e-6,
        d2t=None if full else weights["d2t"],
    )
    return drafter, target.to(device, dtype)


def in_fp8(variant: str) -> bool:
    """Whether `...fp8` or `...fp8:PRODUCT+...` was asked for; the latter says which products sum fast."""
    name, given, products = variant.partition(":")
    Fp8Weight.fast = frozenset(products.split("+")) if given else FAST
    return name.endswith("fp8")


class Ours:
    """Drafter, target and optimiser of one shape; `step` is what is timed."""

    def __init__(self, shape: Shape, fp8: bool) -> None:
        weights = make_weights(shape, "cuda")
        self.drafter, self.target = build(shape, weights, "cuda", torch.bfloat16, fp8)
        self.optimizer = AdamW(self.drafter.parameters(), lr=1e-5, max_grad_norm=0.5)
        self.options = LossOptions(decay=DECAY)

    def step(self, packs: list[PackedBatch]) -> tuple[list[torch.cuda.Event], Tensor]:
        """Forward and backward of every pack, update; an event after each part, and the loss (on device)."""
        marks = [_mark()]
        normaliser = float(sum(pack.rows.supervised_starts for pack in packs))
        total = torch.zeros((), device="cuda")
        for pack in packs:
            loss = self.drafter(pack, self.target, self.options, normaliser).loss
            marks.append(_mark())
            loss.backward()
            marks.append(_mark())
            total += loss.detach()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return [*marks, _mark()], total


def _mark() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _spent_ms(marks: list[torch.cuda.Event]) -> list[float]:
    """(forward, backward, optimiser, step) between the events of `Ours.step`."""
    parts = [a.elapsed_time(b) for a, b in pairwise(marks)]
    return [sum(parts[:-1:2]), sum(parts[1:-1:2]), parts[-1], sum(parts)]


def measure_ours(shape: Shape, options: argparse.Namespace, turn: Any) -> None:
    """Time every supervised fraction; print one RESULT line each."""
    ours = Ours(shape, in_fp8(options.impl))
    torch.cuda.empty_cache()
    batches = {
        f: [pack.to("cpu") for pack in our_packs(shape, make_documents(shape, f, "cuda"))]
        for f in options.fractions
    }
    first_s = {}
    for fraction, host in batches.items():
        started = time.perf_counter()
        ours.step([pack.to("cuda") for pack in host])
        torch.cuda.synchronize()
        first_s[fraction] = time.perf_counter() - started
    turn.alone()
    for fraction, host in batches.items():
        packs = [pack.to("cuda") for pack in host]
        for _ in range(options.warmup):
            ours.step(packs)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        started = time.perf_counter()
        timed = [ours.step(packs) for _ in range(options.iters)]
        launch_ms = 1e3 * (time.perf_counter() - started) / options.iters
        torch.cuda.synchronize()
        times = [_spent_ms(marks) for marks, _ in timed]
        record = measured(shape, fraction, options.impl, times, first_s[fraction])
        record |= _roofline(shape.spec, [pack.rows for pack in host], record["step_ms"])
        record |= {"launch_ms": round(launch_ms, 2), "loss": round(float(timed[-1][1]), 5)}
        record |= {"packs": len(packs)}
        done = step_flops.products_done(partial(ours.step, packs))
        attention = sum(step_flops.needed(shape.spec, pack.rows).attention for pack in host)
        record |= {"flops_done": done + attention}
        print("RESULT " + json.dumps(record), flush=True)
        if options.profile is not None:
            name = f"{options.shape}-{fraction}-{options.impl}.json"
            _profile(partial(ours.step, packs), options.profile / name)
    turn.together()


def measured(
    shape: Shape, fraction: float, impl: str, times_ms: list[list[float]], first_s: float
) -> dict[str, Any]:
    """One result; times are (forward, backward, optimiser, step) of each iteration."""
    forward, backward, optimizer, step = (
        round(statistics.median(column), 2) for column in zip(*times_ms, strict=True)
    )
    return {
        "shape": shape.name,
        "supervised": fraction,
        "impl": impl,
        "tok_s": round(sum(shape.lengths) / step * 1e3, 1),
        "step_ms": step,
        "forward_ms": forward,
        "backward_ms": backward,
        "optimizer_ms": optimizer,
        "first_step_s": round(first_s, 2),
        "peak_mem_bytes": torch.cuda.max_memory_allocated(),
        "hardware": torch.cuda.get_device_name(),
    }


def _roofline(spec: DrafterSpec, plans: list[RowPlan], step_ms: float) -> dict[str, Any]:
    needed = sum(step_flops.needed(spec, rows).total for rows in plans)
    moved = step_flops.optimizer_bytes(spec) + sum(
        step_flops.row_bytes(spec, rows) for rows in plans
    )
    seconds = needed / step_flops.H200_BF16_FLOPS
    return {
        "mfu": round(seconds / (step_ms * 1e-3), 4),
        "flops_needed": needed,
        "flops_without_token_sharing": sum(
            step_flops.without_token_sharing(spec, rows) for rows in plans
        ),
        "floor_ms": round(1e3 * (seconds + moved / step_flops.H200_BYTES), 2),
        "floor_bytes_moved": moved,
        "floor_bytes_resident": step_flops.resident_bytes(spec),
        "rows": [sum(counts) for counts in zip(*(rows.counts for rows in plans), strict=True)],
    }


def _profile(step: Callable[[], object], path: Path) -> None:
    """Device time per kernel of one step, printed and written."""
    from torch.profiler import ProfilerActivity

    with torch.profiler.profile(activities=[ProfilerActivity.CUDA]) as profiler:
        step()
        torch.cuda.synchronize()
    found = [
        (round(e.self_device_time_total / 1e3, 3), e.count, e.key)
        for e in profiler.key_averages()
        if e.self_device_time_total > 0
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(sorted(found, reverse=True), indent=0))
    for total, count, key in sorted(found, reverse=True)[:34]:
        print(f"{total:9.3f} ms {count:5d}x  {key[:100]}")
