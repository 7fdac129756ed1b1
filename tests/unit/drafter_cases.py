"""Tiny drafters, targets and documents that the drafter tests share."""

import copy
import dataclasses
from collections.abc import Sequence

import numpy as np
import torch

from eagle3_train.drafter.attention import QueryRows, StepAttention
from eagle3_train.drafter.frozen import FrozenTarget
from eagle3_train.drafter.model import Eagle3Drafter
from eagle3_train.drafter.rows import PackedBatch, plan_rows
from eagle3_train.drafter.spec import DrafterSpec, MlaShape, RopeSpec
from tests.unit.drafter_reference import Document

VOCAB, HIDDEN = 48, 24


def llama_spec(**changes: object) -> DrafterSpec:
    fields: dict[str, object] = {
        "hidden_size": HIDDEN,
        "intermediate_size": 40,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 6,
        "vocab_size": VOCAB,
        "draft_vocab_size": 20,
        "max_position_embeddings": 128,
        "rope": RopeSpec(theta=100.0),
    }
    return DrafterSpec(**{**fields, **changes})  # type: ignore[arg-type]


def mla_spec(**changes: object) -> DrafterSpec:
    fields: dict[str, object] = {
        "num_kv_heads": 4,
        "head_dim": 10,
        "q_lora_rank": 12,
        "kv_lora_rank": 8,
        "qk_nope_head_dim": 6,
        "qk_rope_head_dim": 4,
        "v_head_dim": 5,
        "rope": RopeSpec(
            rope_type="yarn",
            theta=100.0,
            factor=4.0,
            original_max_position_embeddings=16,
            mscale=1.0,
            mscale_all_dim=0.7,
        ),
    }
    fields |= changes
    mla = MlaShape(**{f.name: fields.pop(f.name) for f in dataclasses.fields(MlaShape)})  # type: ignore[arg-type]
    return llama_spec(**fields, mla=mla)


def make_target(spec: DrafterSpec, seed: int = 0) -> FrozenTarget:
    g = torch.Generator().manual_seed(seed)
    d2t = None
    if not spec.full_vocab:
        ids = torch.randperm(spec.vocab_size, generator=g)[: spec.draft_vocab_size].sort().values
        d2t = ids - torch.arange(len(ids))

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    return FrozenTarget(
        embed=normal(spec.vocab_size, spec.hidden_size),
        lm_head=normal(spec.vocab_size, spec.hidden_size) * 0.5,
        norm_weight=1 + 0.1 * normal(spec.hidden_size),
        norm_eps=1e-5,
        d2t=d2t,
    )


def make_drafter(spec: DrafterSpec, seed: int = 1) -> Eagle3Drafter:
    g = torch.Generator().manual_seed(seed)
    drafter = Eagle3Drafter(spec, dtype=torch.float64)
    with torch.no_grad():
        for parameter in drafter.parameters():
            noise = torch.randn(parameter.shape, generator=g, dtype=torch.float64)
            scale = parameter.shape[-1] ** -0.5
            parameter.copy_(noise * scale if parameter.ndim > 1 else 1 + 0.1 * noise)
    return drafter


def make_document(spec: DrafterSpec, mask: Sequence[int], seed: int) -> Document:
    g = torch.Generator().manual_seed(seed)
    n = len(mask)
    return Document(
        ids=torch.randint(spec.vocab_size, (n,), generator=g),
        mask=torch.tensor(mask, dtype=torch.bool),
        aux=torch.randn(n - 1, spec.num_aux * spec.hidden_size, generator=g, dtype=torch.float64),
        last=torch.randn(n - 1, spec.hidden_size, generator=g, dtype=torch.float64),
    )


def pack(documents: Sequence[Document], ttt_steps: int) -> PackedBatch:
    ids = [document.ids.numpy() for document in documents]
    masks = [np.asarray(document.mask) for document in documents]
    return PackedBatch(
        plan_rows(ids, masks, ttt_steps),
        torch.cat([document.aux for document in documents]),
        torch.cat([document.last for document in documents]),
    )


def gradients(drafter: Eagle3Drafter) -> dict[str, torch.Tensor]:
    return {
        name: torch.zeros_like(p) if p.grad is None else p.grad
        for name, p in drafter.named_parameters()
    }


def twin(drafter: Eagle3Drafter) -> Eagle3Drafter:
    other = copy.deepcopy(drafter)
    other.zero_grad()
    return other


# one answer; two turns; supervised from the first token; nothing; an answer shorter than a chain; a lone token
MASKS = (
    [0, 0, 0, 1, 1, 1, 1, 1, 1],
    [0, 1, 1, 1, 0, 0, 1, 1, 1, 1, 0],
    [1, 1, 1, 1, 1, 1],
    [0, 0, 0, 0, 0],
    [0, 0, 1, 1, 1],
    [0, 0, 0, 1, 0],
)


def attention_errors(device: str) -> list[float]:
    """Relative errors in bf16 of attention's output and of the gradients of queries and keys with values.

    The keys have a share in common: scores of about 300, which differ by about 20.
    """
    spec = llama_spec()
    rows = pack([make_document(spec, [0] * 20 + [1] * 60, 10)], 1).rows
    starts, context, width = rows.counts[0], len(rows.context), 2 * spec.head_dim
    unrotated = torch.ones(128, spec.head_dim // 2), torch.zeros(128, spec.head_dim // 2)
    g = torch.Generator().manual_seed(0)
    query = torch.randn(starts, 2 * width, generator=g) + 16
    keys = torch.randn(context, width, generator=g) / 2 + 8
    key_value = torch.cat([keys, torch.randn(context, width, generator=g)], 1)
    d_out = torch.randn(starts, 2 * width, generator=g).bfloat16()
    found = []
    for where, dtype in (("cpu", torch.float64), (device, torch.bfloat16)):
        inputs = [x.bfloat16().to(where, dtype).requires_grad_() for x in (query, key_value)]
        at, tables = rows.to(torch.device(where)), tuple(t.to(where) for t in unrotated)
        like = torch.empty(0, dtype=dtype, device=where)
        attend = StepAttention(spec, [starts], [context], at.offsets, like)
        out = attend(inputs[0].clone(), inputs[1], QueryRows.of_step(at, 0, tables))
        out.backward(d_out.to(where, dtype))
        found.append(
            [x.detach().to("cpu", torch.float64) for x in (out, *(i.grad for i in inputs))]
        )
    pairs = zip(*found, strict=True)
    return [((rounded - exact).norm() / exact.norm()).item() for exact, rounded in pairs]
