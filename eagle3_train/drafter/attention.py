"""Attention of one drafter layer over all TTT steps: causal over the step-0 keys, plus a diagonal.

  query (k, t) sees   keys of step 0 at j <= t, same document        (a causal block, one matmul)
                      keys of steps 1..k at the same t               (k dot products)

Both parts share one softmax; RoPE is applied here, at position t + k. Keys and values of all steps live in a
`StepAttention`; their gradients are summed there in fp32 and handed to autograd when their own step's backward
runs, which is after that of every later step. CUDA runs `attention_kernels`; the code here is the same
arithmetic, document by document.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.autograd import Function

from eagle3_train.drafter import rope
from eagle3_train.drafter.rope import softmax_scale
from eagle3_train.drafter.rows import RowPlan
from eagle3_train.drafter.spec import DrafterSpec
from eagle3_train.drafter.stepwise import Stack, wide

Angles = tuple[Tensor, Tensor]
"""(cos, sin) of each row, [rows, rope_dim / 2]."""
Saved = tuple[Tensor, Tensor, Tensor, Tensor]
"""query, out, log-sum-exp of the scores (base 2 on CUDA) and d_out of one step."""


@dataclass(frozen=True, slots=True)
class QueryRows:
    """Query rows of one step: their `order` by position, and for each ordered row the context rows it sees."""

    order: Int[Tensor, " rows"]
    begin: Int[Tensor, " rows"]
    end: Int[Tensor, " rows"]
    query_angles: Angles
    key_angles: Angles

    @classmethod
    def of_step(cls, rows: RowPlan, k: int, tables: Angles) -> "QueryRows":
        """The starts active at step k; at step 0 the keys are all context rows, later the queries' own."""
        order = rows.at(rows.order, k)
        own = rows.starts.index_select(0, order)
        at = rows.positions.index_select(0, rows.starts[: rows.counts[k]]) + k
        query, keys = _angles(tables, at), _angles(tables, rows.positions) if k == 0 else None
        return cls(order, rows.begin.index_select(0, own), own + 1, query, keys or query)

    @classmethod
    def of_context(cls, rows: RowPlan, tables: Angles) -> "QueryRows":
        """Every context row as a query (lower layers of a deep drafter at step 0)."""
        own = torch.arange(len(rows.context), dtype=torch.int32, device=rows.context.device)
        angles = _angles(tables, rows.positions)
        return cls(own, rows.begin, own + 1, angles, angles)

    def documents(self) -> Iterator[tuple[Tensor, int, int, Tensor]]:
        """(rows, first key, last key + 1, own key of each row relative to the first) per document."""
        begins, counts = self.begin.unique_consecutive(return_counts=True)
        sizes = counts.tolist()
        parts = zip(begins.tolist(), self.order.split(sizes), self.end.split(sizes), strict=True)
        for begin, rows, end in parts:
            yield rows, begin, int(end[-1]), end - 1 - begin


def _angles(tables: Angles, positions: Tensor) -> Angles:
    return tables[0].index_select(0, positions), tables[1].index_select(0, positions)


class StepAttention:
    """Keys, values and their gradients of one layer, over the steps of one forward pass.

    queries and keys are the row counts of every step; keys[0] are the context rows. Keys and values of all steps lie in
    `store` [all keys, kv_heads * (qk_dim + value_dim)]: the `context` rows first, then those of each later step, which
    begin at `offsets`. `grads` (fp32) is laid out alike. `like` lends dtype and device.
    """

    def __init__(
        self,
        spec: DrafterSpec,
        queries: Sequence[int],
        keys: Sequence[int],
        offsets: Tensor,
        like: Tensor,
    ) -> None:
        self.heads, self.kv_heads = spec.num_heads, spec.num_kv_heads
        self.qk_dim, self.value_dim = spec.head_dim, spec.value_dim
        self.scale = softmax_scale(spec)
        # vLLM rotates pairs (2i, 2i+1) of an MLA drafter's heads, pairs (i, i + dim/2) of a Llama drafter's.
        self.interleaved = spec.attention == "mla"
        self.offsets, self.context = offsets, keys[0]
        width = self.kv_heads * (self.qk_dim + self.value_dim)
        self.store = Stack(keys, width, like)
        self.grads = Stack(keys, width, like.new_empty(0, dtype=wide(like.dtype)), zero=True)
        self.output = Stack(queries, self.heads * self.value_dim, like)
        self.d_query = Stack(queries, self.heads * self.qk_dim, like)
        self.d_key_value = Stack(keys, width, like)
        self.steps = 0

    def __call__(
        self,
        query: Float[Tensor, "rows q_width"],
        key_value: Float[Tensor, "key_rows kv_width"],
        rows: QueryRows,
    ) -> Float[Tensor, "rows out_width"]:
        """Attend at the next step; `key_value` holds this step's own key heads, then its value heads.

        `query` is rotated in place and must be a fresh product.
        """
        return _Attend.apply(query, key_value, self, rows)  # type: ignore[no-any-return, no-untyped-call]

    def split(self, key_value: Tensor) -> tuple[Tensor, Tensor]:
        """Views [rows, kv_heads, dim] of packed keys and values."""
        width = self.kv_heads * self.qk_dim
        key = key_value[:, :width].unflatten(1, (self.kv_heads, self.qk_dim))
        return key, key_value[:, width:].unflatten(1, (self.kv_heads, self.value_dim))

    def turn_(self, x: Tensor, angles: Angles, back: bool = False) -> None:
        """Rotate the last rope_dim of each head in place (back: by the opposite angle)."""
        if x.is_cuda:
            from eagle3_train.drafter import kernels

            kernels.rotate_(x, *angles, self.interleaved, back)
            return
        cos, sin = angles
        turning = x[..., x.shape[-1] - 2 * cos.shape[-1] :]
        turning.copy_(rope.rotate(turning, cos, -sin if back else sin, self.interleaved))

    def push(self, key_value: Tensor, angles: Angles) -> int:
        """Store a step's keys, rotated, and values; return its number."""
        k, self.steps = self.steps, self.steps + 1
        stored = self.store.step(k).copy_(key_value)
        self.turn_(self.split(stored)[0], angles)
        return k

    def pop(self, k: int, angles: Angles) -> Tensor:
        """Final gradient of step k's packed keys and values."""
        grads = self.grads.step(k)
        self.turn_(self.split(grads)[0], angles, back=True)
        return self.d_key_value.step(k).copy_(grads)

    def pairs(self, stack: Stack, count: int) -> tuple[list[Tensor], list[Tensor]]:
        """Key and value views of the first `count` steps of a Stack."""
        views = [self.split(stack.step(j)) for j in range(count)]
        return [key for key, _ in views], [value for _, value in views]


class _Attend(Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key_value: Tensor, state: StepAttention, rows: QueryRows
    ) -> Tensor:
        query = query.detach().unflatten(1, (state.heads, state.qk_dim))
        state.turn_(query, rows.query_angles)
        k = state.push(key_value.detach(), rows.key_angles)
        out = state.output.step(k)
        lse = torch.empty(query.shape[:2], dtype=wide(query.dtype), device=query.device)
        if query.is_cuda:
            from eagle3_train.drafter import attention_launch

            attention_launch.forward(query, state, rows, out, lse)
        else:
            _forward(query, state, rows, out, lse)
        ctx.saved, ctx.state, ctx.rows, ctx.k = (query, out.detach(), lse), state, rows, k
        return out

    @staticmethod
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        state, k, saved = ctx.state, ctx.k, (*ctx.saved, d_out.contiguous())
        d_query = state.d_query.step(k).unflatten(1, (state.heads, state.qk_dim))
        if d_out.is_cuda:
            from eagle3_train.drafter import attention_launch

            attention_launch.backward(saved, state, ctx.rows, k, d_query)
        else:
            _backward(saved, state, ctx.rows, k, d_query)
        state.turn_(d_query, ctx.rows.query_angles, back=True)
        ctx.saved = None
        return d_query.flatten(1), state.pop(k, ctx.rows.key_angles), None, None


def _dots(x: Tensor, context: Tensor, later: list[Tensor], rows: Tensor) -> Tensor:
    """x [rows, kv_heads, group, dim] with a document's step-0 keys and with each row's own later ones: [kv_heads,
    group, rows, context keys + diagonal]; values in place of keys when x is a gradient. Never narrower than fp32."""
    dtype = wide(x.dtype)
    x, own = x.to(dtype), [y.index_select(0, rows).to(dtype) for y in later]
    diagonal = [torch.einsum("mhgd,mhd->hgm", x, y) for y in own]
    causal = torch.einsum("mhgd,jhd->hgmj", x, context.to(dtype))
    return torch.cat([causal, *(part[..., None] for part in diagonal)], -1)


def _scores(
    query: Tensor, context: Tensor, later: list[Tensor], rows: Tensor, own: Tensor
) -> Tensor:
    """Scores of one document's rows before scaling, -inf at keys past the row's own."""
    scores = _dots(query, context, later, rows)
    hidden = torch.arange(len(context), device=own.device) > own[:, None]
    scores[..., : len(context)].masked_fill_(hidden, float("-inf"))
    return scores


def _forward(
    query: Tensor, state: StepAttention, rows: QueryRows, out: Tensor, lse: Tensor
) -> None:
    heads = (state.kv_heads, state.heads // state.kv_heads)
    grouped = query.unflatten(1, heads)
    keys, values = state.pairs(state.store, state.steps)
    out, lse = out.view(len(out), *heads, -1), lse.view(len(lse), *heads)
    for picked, first, last, own in rows.documents():
        part = grouped.index_select(0, picked)
        scores = _scores(part, keys[0][first:last], keys[1:], picked, own) * state.scale
        norm = scores.logsumexp(-1)
        weights = (scores - norm[..., None]).exp_().to(part.dtype)
        part = torch.einsum("hgmj,jhd->mhgd", weights[..., : last - first], values[0][first:last])
        for j, value in enumerate(values[1:], last - first):
            part += torch.einsum("hgm,mhd->mhgd", weights[..., j], value.index_select(0, picked))
        out.index_copy_(0, picked.long(), part)
        lse.index_copy_(0, picked.long(), norm.permute(2, 0, 1))


def _backward(saved: Saved, state: StepAttention, rows: QueryRows, k: int, d_query: Tensor) -> None:
    """Write the query's gradient and add to those of keys and values. Scores are recomputed."""
    query, out, lse, d_out = saved
    heads = (state.kv_heads, state.heads // state.kv_heads)
    keys, values = state.pairs(state.store, k + 1)
    key_grads, value_grads = state.pairs(state.grads, k + 1)
    scale = state.scale
    grouped, d_query = query.unflatten(1, heads), d_query.unflatten(1, heads)
    lse, d_out = lse.view(len(lse), *heads), d_out.view(len(lse), *heads, -1)
    delta = (out.view(d_out.shape).to(lse.dtype) * d_out).sum(-1)
    for picked, first, last, own in rows.documents():
        q, do = grouped.index_select(0, picked), d_out.index_select(0, picked)
        scores = _scores(q, keys[0][first:last], keys[1:], picked, own) * scale
        weights = (scores - lse.index_select(0, picked).permute(1, 2, 0)[..., None]).exp_()
        d_weights = _dots(do, values[0][first:last], values[1:], picked)
        shift = delta.index_select(0, picked).permute(1, 2, 0)[..., None]
        d_scores = (weights * (d_weights - shift) * scale).to(q.dtype)
        weights = weights.to(q.dtype)
        causal = d_scores[..., : last - first]
        dq = torch.einsum("hgmj,jhd->mhgd", causal, keys[0][first:last])
        key_grads[0][first:last] += torch.einsum("hgmj,mhgd->jhd", causal, q)
        value_grads[0][first:last] += torch.einsum(
            "hgmj,mhgd->jhd", weights[..., : last - first], do
        )
        for j in range(1, k + 1):
            ds, w = d_scores[..., last - first + j - 1], weights[..., last - first + j - 1]
            dq += torch.einsum("hgm,mhd->mhgd", ds, keys[j].index_select(0, picked))
            for grads, weight, x in ((key_grads[j], ds, q), (value_grads[j], w, do)):
                part = torch.einsum("hgm,mhgd->mhd", weight, x)
                grads.index_add_(0, picked, part.to(grads.dtype))
        d_query.index_copy_(0, picked.long(), dq)
