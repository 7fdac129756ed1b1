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
from eagle3_train.drafter.rows import RowPlan
from eagle3_train.drafter.stepwise import Stack, wide

Angles = tuple[Tensor, Tensor]
"""(cos, sin) of each row, [rows, rope_dim / 2]."""


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
        begins, sizes = self.begin.unique_consecutive(return_counts=True)
        parts = zip(
            begins.tolist(),
            self.order.split(sizes.tolist()),
            self.end.split(sizes.tolist()),
            strict=True,
        )
        for begin, rows, end in parts:
            yield rows, begin, int(end[-1]), end - 1 - begin


def _angles(tables: Angles, positions: Tensor) -> Angles:
    return tables[0].index_select(0, positions), tables[1].index_select(0, positions)


class StepAttention:
    """Keys, values and their gradients of one layer, over the steps of one forward pass."""

    def __init__(
        self, heads: tuple[int, int], dims: tuple[int, int], scale: float, interleaved: bool
    ) -> None:
        self.heads, self.kv_heads = heads
        self.qk_dim, self.value_dim = dims
        self.scale = scale
        self.interleaved = interleaved
        self.output: Stack | None = None
        self.d_query: Stack | None = None
        self.d_key_value: Stack | None = None
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []
        self._grads: list[tuple[Tensor, Tensor] | None] = []

    def place(self, outputs: Sequence[int], keys: Sequence[int], like: Tensor) -> None:
        """Keep the outputs, and in backward the input gradients, of all steps in Stacks of these row counts."""
        self.output = Stack(outputs, self.heads * self.value_dim, like)
        self.d_query = Stack(outputs, self.heads * self.qk_dim, like)
        self.d_key_value = Stack(keys, self.kv_heads * (self.qk_dim + self.value_dim), like)

    def __call__(
        self,
        query: Float[Tensor, "rows q_width"],
        key_value: Float[Tensor, "key_rows kv_width"],
        rows: QueryRows,
    ) -> Float[Tensor, "rows out_width"]:
        """Attend at the next step; `key_value` holds this step's own key heads, then its value heads.

        Both inputs are overwritten on CUDA (rotated in place) and must be fresh products.
        """
        return _Attend.apply(query, key_value, self, rows)  # type: ignore[no-any-return, no-untyped-call]

    def split(self, key_value: Tensor) -> tuple[Tensor, Tensor]:
        """Views [rows, kv_heads, dim] of packed keys and values."""
        width = self.kv_heads * self.qk_dim
        key = key_value[:, :width].unflatten(1, (self.kv_heads, self.qk_dim))
        return key, key_value[:, width:].unflatten(1, (self.kv_heads, self.value_dim))

    def turn(self, x: Tensor, angles: Angles, back: bool = False) -> Tensor:
        """Rotate the last rope_dim of each head (back: by the opposite angle)."""
        cos, sin = angles[0], -angles[1] if back else angles[1]
        if x.is_cuda:
            from eagle3_train.drafter import kernels

            return kernels.rotate_(x, cos, sin, self.interleaved)
        still = x.shape[-1] - 2 * cos.shape[-1]
        turned = rope.rotate(x[..., still:], cos, sin, self.interleaved)
        return torch.cat([x[..., :still], turned], -1) if still else turned

    def push(self, key: Tensor, value: Tensor) -> int:
        """Store a step's keys and values; return its number."""
        self.keys.append(key)
        self.values.append(value)
        self._grads.append(None)
        return len(self.keys) - 1

    def grads(self, k: int) -> tuple[Tensor, Tensor]:
        """The running gradients of step k's keys and values, in fp32."""
        found = self._grads[k]
        if found is None:
            high = wide(self.keys[k].dtype)
            shape = (self.keys[k].shape, self.values[k].shape)
            found = tuple(torch.zeros(s, dtype=high, device=self.keys[k].device) for s in shape)  # type: ignore[assignment]
            self._grads[k] = found
        assert found is not None
        return found

    def pop(self, k: int, angles: Angles) -> Tensor:
        """Final gradient of step k's packed keys and values; forgets it."""
        d_key, d_value = self.grads(k)
        self._grads[k] = None
        like = self.keys[k]
        width = self.kv_heads * (self.qk_dim + self.value_dim)
        out = (
            like.new_empty(len(like), width)
            if self.d_key_value is None
            else self.d_key_value.step(k)
        )
        to_key, to_value = self.split(out)
        to_key.copy_(self.turn(d_key, angles, back=True))
        to_value.copy_(d_value)
        return out


class _Attend(Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, query: Tensor, key_value: Tensor, state: StepAttention, rows: QueryRows
    ) -> Tensor:
        query = state.turn(
            query.detach().unflatten(1, (state.heads, state.qk_dim)), rows.query_angles
        )
        key, value = state.split(key_value.detach())
        k = state.push(state.turn(key, rows.key_angles), value)
        width = state.heads * state.value_dim
        out = query.new_empty(len(query), width) if state.output is None else state.output.step(k)
        lse = torch.empty(query.shape[:2], dtype=wide(query.dtype), device=query.device)
        if query.is_cuda:
            from eagle3_train.drafter import attention_kernels

            attention_kernels.forward(query, state.keys, state.values, rows, state.scale, out, lse)
        else:
            _forward(query, state, rows, out, lse)
        ctx.query, ctx.out, ctx.lse = query, out.detach(), lse
        ctx.state, ctx.rows, ctx.k = state, rows, k
        return out

    @staticmethod
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        state, k, query = ctx.state, ctx.k, ctx.query
        width = state.heads * state.qk_dim
        flat = (
            query.new_empty(len(query), width) if state.d_query is None else state.d_query.step(k)
        )
        d_query = flat.view(query.shape)
        grads = [state.grads(j) for j in range(k + 1)]
        saved = (query, ctx.out, ctx.lse, d_out.contiguous())
        if d_out.is_cuda:
            from eagle3_train.drafter import attention_kernels

            keys, values = state.keys[: k + 1], state.values[: k + 1]
            attention_kernels.backward(saved, keys, values, grads, ctx.rows, state.scale, d_query)
        else:
            _backward(saved, state, grads, ctx.rows, d_query)
        turned = state.turn(d_query, ctx.rows.query_angles, back=True)
        if turned is not d_query:
            d_query.copy_(turned)
        d_key_value = state.pop(k, ctx.rows.key_angles)
        ctx.query = ctx.out = ctx.lse = None
        return flat, d_key_value, None, None


def _scores(
    query: Tensor,
    keys: list[Tensor],
    rows: Tensor,
    span: tuple[int, int],
    own: Tensor,
    scale: float,
) -> Tensor:
    """[kv_heads, group, rows, context keys + diagonal] of one document's rows."""
    first, last = span
    causal = torch.einsum("mhgd,jhd->hgmj", query, keys[0][first:last]) * scale
    hidden = torch.arange(last - first, device=own.device) > own[:, None]
    causal = causal.masked_fill(hidden, float("-inf"))
    diagonal = [
        torch.einsum("mhgd,mhd->hgm", query, key.index_select(0, rows))[..., None] * scale
        for key in keys[1:]
    ]
    return torch.cat([causal, *diagonal], -1)


def _forward(
    query: Tensor, state: StepAttention, rows: QueryRows, out: Tensor, lse: Tensor
) -> None:
    heads = (state.kv_heads, state.heads // state.kv_heads)
    grouped = query.unflatten(1, heads)
    out, lse = out.view(len(out), *heads, -1), lse.view(len(lse), *heads)
    for picked, first, last, own in rows.documents():
        part = grouped.index_select(0, picked)
        scores = _scores(part, state.keys, picked, (first, last), own, state.scale)
        norm = scores.logsumexp(-1)
        weights = (scores - norm[..., None]).exp_()
        part = torch.einsum(
            "hgmj,jhd->mhgd", weights[..., : last - first], state.values[0][first:last]
        )
        for j, value in enumerate(state.values[1:], last - first):
            part += torch.einsum("hgm,mhd->mhgd", weights[..., j], value.index_select(0, picked))
        out.index_copy_(0, picked.long(), part)
        lse.index_copy_(0, picked.long(), norm.permute(2, 0, 1).to(lse.dtype))


def _backward(
    saved: tuple[Tensor, Tensor, Tensor, Tensor],
    state: StepAttention,
    grads: list[tuple[Tensor, Tensor]],
    rows: QueryRows,
    d_query: Tensor,
) -> None:
    """Write the query's gradient and add to those of keys and values. Scores are recomputed."""
    query, out, lse, d_out = saved
    heads = (state.kv_heads, state.heads // state.kv_heads)
    keys, values, scale = state.keys[: len(grads)], state.values[: len(grads)], state.scale
    grouped, d_query = query.unflatten(1, heads), d_query.unflatten(1, heads)
    lse, d_out = lse.view(len(lse), *heads), d_out.view(len(lse), *heads, -1)
    delta = (out.view(d_out.shape) * d_out).sum(-1)
    for picked, first, last, own in rows.documents():
        q, do = grouped.index_select(0, picked), d_out.index_select(0, picked)
        scores = _scores(q, keys, picked, (first, last), own, scale)
        weights = (scores - lse.index_select(0, picked).permute(1, 2, 0)[..., None]).exp_()
        parts = [torch.einsum("mhgd,jhd->hgmj", do, values[0][first:last])]
        for value in values[1:]:
            parts.append(
                torch.einsum("mhgd,mhd->hgm", do, value.index_select(0, picked))[..., None]
            )
        shift = delta.index_select(0, picked).permute(1, 2, 0)[..., None]
        d_scores = (weights * (torch.cat(parts, -1) - shift) * scale).to(q.dtype)
        weights = weights.to(q.dtype)
        causal = d_scores[..., : last - first]
        dq = torch.einsum("hgmj,jhd->mhgd", causal, keys[0][first:last])
        grads[0][0][first:last] += torch.einsum("hgmj,mhgd->jhd", causal, q)
        grads[0][1][first:last] += torch.einsum("hgmj,mhgd->jhd", weights[..., : last - first], do)
        for column, (key, grad) in enumerate(zip(keys[1:], grads[1:], strict=True), last - first):
            ds, w = d_scores[..., column], weights[..., column]
            dq += torch.einsum("hgm,mhd->mhgd", ds, key.index_select(0, picked))
            d_key, d_value = (torch.einsum("hgm,mhgd->mhd", *pair) for pair in ((ds, q), (w, do)))
            grad[0].index_add_(0, picked, d_key.to(grad[0].dtype))
            grad[1].index_add_(0, picked, d_value.to(grad[1].dtype))
        d_query.index_copy_(0, picked.long(), dq)
