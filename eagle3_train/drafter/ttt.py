"""The training-time-test step: K teacher-forced drafting steps over one pack (`model.py` adds their loss).

Alignment for one document, nothing shifted (t is local; x ids, a auxiliary states, L last states):

  step k, start t     state h_k[t]      embedding of x[t+1+k]     drafts x[t+2+k]     teacher L[t+1+k]
  k = 0               fc(a[t])                   x[t+1]                  x[t+2]               L[t+1]
  k = 1               h_1[t]                     x[t+2]                  x[t+3]               L[t+2]

What makes it fast, all of it exact:
  rows        only supervised (k, t) rows are computed; others need at most their step-0 key and value
  embedding   the half of q/k/v that reads the embedding depends on the token alone: computed once per token
  teacher     once per supervised target token, whatever the number of steps
  weights     one weight-gradient matmul over the rows of all steps (`stepwise`)
  head        logits, loss and gradient in one pass over a chunk of rows (`losses`)
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional as F

from eagle3_train.drafter.attention import QueryRows, StepAttention
from eagle3_train.drafter.frozen import FrozenTarget
from eagle3_train.drafter.layers import GatedDown, norm_fork, norm_fork_two, rms_norm
from eagle3_train.drafter.modules import DecoderLayer, DrafterWeights
from eagle3_train.drafter.projections import project
from eagle3_train.drafter.rope import rope_tables
from eagle3_train.drafter.rows import PackedBatch, RowPlan
from eagle3_train.drafter.stepwise import Stack, StepLinear, wide


@dataclass(frozen=True, slots=True)
class StepMetrics:
    """Hits against the target's full-vocabulary argmax. A hit: the draft is that very token.

    supervised[k] rows were drafted at step k; correct[k] of them hit, prefix[k] hit at steps 0..k.
    accepted[i] is the number of leading hits of start i (in the order of `RowPlan.starts`).
    """

    supervised: tuple[int, ...]
    correct: Int[Tensor, " steps"]
    prefix: Int[Tensor, " steps"]
    accepted: Int[Tensor, " starts"]


@dataclass(frozen=True, slots=True)
class StepOutput:
    """Loss of one pack (a differentiable scalar), and metrics when they were asked for."""

    loss: Float[Tensor, ""]
    metrics: StepMetrics | None


class LayerPass:
    """One decoder layer during one forward pass: the weights, and what its steps share."""

    def __init__(
        self,
        drafter: DrafterWeights,
        layer: DecoderLayer,
        rows: RowPlan,
        embedded: Tensor | None,
    ) -> None:
        spec, fp8, like = drafter.spec, drafter.multiplies_in_fp8, layer.mlp.gate_proj.weight
        counts = rows.counts[: rows.steps]
        keys = [len(rows.context), *counts[1:]]
        # lower layers run every context row at step 0: the next layer's keys need it
        queries = counts if layer.index == spec.num_layers - 1 else keys
        self.attention = StepAttention(spec, queries, keys, rows.offsets, like)
        self.query, self.key_value = project(spec, layer.self_attn, rows, embedded, fp8)

        def linear(weight: Tensor) -> StepLinear:
            return StepLinear(weight, Stack(queries, len(weight), like), fp8)

        self.out = linear(layer.self_attn.o_proj.weight)
        self.gate, self.up = linear(layer.mlp.gate_proj.weight), linear(layer.mlp.up_proj.weight)
        self.down = GatedDown(linear(layer.mlp.down_proj.weight), queries)
        self.norm, self.eps = layer.post_attention_layernorm.weight, spec.rms_norm_eps
        self.normed = Stack(queries, spec.hidden_size, like)

    def __call__(
        self,
        k: int,
        residual: Float[Tensor, "rows hidden"],
        normed: Float[Tensor, "key_rows hidden"],
        rows: QueryRows,
        select: Int[Tensor, " rows"] | None,
    ) -> Float[Tensor, "rows hidden"]:
        """The layer at step k. Keys come from every row of `normed`, queries from those in `select`."""
        picked = normed if select is None else normed.index_select(0, select)
        attended = self.attention(self.query(k, picked), self.key_value(k, normed), rows)
        residual = self.out(k, attended, residual)
        residual, normed = norm_fork(residual, self.norm, self.eps, (self.normed, k), consume=True)
        return self.down(k, self.gate(k, normed), self.up(k, normed), residual)


def fuse_aux(
    drafter: DrafterWeights, aux: Float[Tensor, "rows aux_hidden"]
) -> Float[Tensor, "rows hidden"]:
    """h_0: the auxiliary states through fc, normed first where the spec says so."""
    spec = drafter.spec
    if spec.norm_before_fc:
        aux = rms_norm(aux, drafter.input_norm.weight, spec.rms_norm_eps)
    if spec.fc_norm:
        parts = zip(aux.chunk(spec.num_aux, -1), drafter.fc_norms, strict=True)
        aux = torch.cat(
            [rms_norm(part.contiguous(), w, spec.rms_norm_eps) for part, w in parts], -1
        )
    return F.linear(aux, drafter.fc.weight)


def context_states(
    drafter: DrafterWeights, aux: Float[Tensor, "states aux_hidden"], context: Int[Tensor, " rows"]
) -> Float[Tensor, "rows hidden"]:
    """h_0 of the context rows; when they are nearly all rows, picked after fc rather than copied before it."""
    if len(context) < 0.95 * len(aux):
        return fuse_aux(drafter, aux.index_select(0, context))
    hidden = fuse_aux(drafter, aux)
    return hidden if len(context) == len(aux) else hidden.index_select(0, context)


def unroll(
    drafter: DrafterWeights, batch: PackedBatch, target: FrozenTarget
) -> list[Float[Tensor, "_ hidden"]]:
    """Normed outputs of every step, ready for the draft head: one tensor per step, in one Stack."""
    rows, spec, layers = batch.rows, drafter.spec, drafter.decoder_layers
    steps, starts, eps = rows.steps, rows.starts, spec.rms_norm_eps
    counts = rows.counts[:steps]
    embedded = F.embedding(rows.context_ids, target.embed)
    embedded = rms_norm(embedded, layers[0].input_layernorm.weight, eps)
    passes = [
        LayerPass(drafter, layer, rows, None if layer.index else embedded) for layer in layers
    ]
    hidden = context_states(drafter, batch.aux_hidden_states, rows.context)
    tables = rope_tables(spec, rows.max_position, hidden.device, wide(hidden.dtype))
    outputs = Stack(counts, spec.hidden_size, hidden)
    inputs = Stack((*counts[1:], 0), spec.hidden_size, hidden)

    state_norm, norm = layers[0].state_norm.weight, drafter.norm.weight
    residual, normed = norm_fork(hidden, state_norm, eps)
    collected: list[Tensor] = []
    for k in range(steps):
        query_rows = QueryRows.of_step(rows, k, tables)
        for layer, run in zip(layers, passes, strict=True):
            if layer is not layers[0]:
                residual, normed = norm_fork(hidden, layer.state_norm.weight, eps)
            if k == 0 and layer is layers[-1]:
                hidden = run(k, residual.index_select(0, starts), normed, query_rows, starts)
            elif k == 0:
                hidden = run(k, residual, normed, QueryRows.of_context(rows, tables), None)
            else:
                hidden = run(k, residual, normed, query_rows, None)
        following = counts[k + 1] if k + 1 < steps else 0
        if spec.norm_output:
            output = rms_norm(hidden, norm, eps)
            residual, normed = norm_fork(output[:following], state_norm, eps)
            output = output.clone()  # the head overwrites it
        else:
            residual, normed, output = norm_fork_two(
                hidden, state_norm, norm, eps, following, (inputs, k), (outputs, k)
            )
        collected.append(output)
    return collected


@torch.no_grad()
def hits(rows: RowPlan, correct: Tensor) -> StepMetrics:
    """Per-step and leading hits from the hit of every flat row (bool[R])."""
    accepted = torch.zeros(len(rows.starts), dtype=torch.int32, device=correct.device)
    leading = torch.ones_like(accepted, dtype=torch.bool)
    totals = torch.zeros(2, len(rows.counts), dtype=torch.int64, device=correct.device)
    for k in range(rows.steps):
        hit = rows.at(correct, k)
        leading = leading[: len(hit)] & hit
        totals[0, k], totals[1, k] = hit.sum(), leading.sum()
        accepted[: len(hit)] += leading
    return StepMetrics(rows.counts, totals[0], totals[1], accepted)
