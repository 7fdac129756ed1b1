"""Our step against a peer's dump of losses and gradients, on the peer's inputs and under the peer's mask rule.

python bench_specforge_step.py ... --dump specforge.pt      (the driver, see --peers in step.py)
python -m benchmarks.step_parity specforge.pt -- the same arguments
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path

import torch

from benchmarks.step_ours import DECAY, Shape, build, peer_rule_batch
from eagle3_train.drafter.losses import LossOptions, target_answers, target_states


def compare(
    dump: Path, arguments: list[str], drivers: Path, dtype: torch.dtype, device: str
) -> dict[str, object]:
    """Relative errors of the loss and of each parameter's gradient (2-norms)."""
    sys.path.insert(0, str(drivers))
    import bench_common

    args = bench_common.add_args(argparse.ArgumentParser()).parse_known_args(arguments)[0]
    shape = Shape(
        "parity", args.hidden, args.inter, args.heads, args.kv_heads, args.vocab, args.draft_vocab,
        args.rope_theta, args.ttt, (args.seq,) * args.batch, args.head_dim,
    )  # fmt: skip
    weights, raw = bench_common.make_weights(args), bench_common.make_batch(args)
    drafter, target = build(shape, weights, device, dtype)
    full = args.vocab == args.draft_vocab
    names = {"ids": "input_ids", "mask": "loss_mask", "aux": "aux", "last": "last_hidden"}
    documents = [
        {ours: raw[theirs][b] for ours, theirs in names.items()} for b in range(args.batch)
    ]
    batch = peer_rule_batch(shape, documents).to(device, dtype)
    theirs = torch.load(dump)
    normaliser = (
        args.batch * args.seq if theirs["impl"] == "specforge" else float(raw["loss_mask"].sum())
    )
    if not full:  # they give no weight to rows whose target argmax is outside the draft vocabulary
        answers = target_answers(target_states(batch, target), target)
        keep = weights["t2d"].to(device)[answers][batch.rows.slots]
        batch = replace(batch, rows=replace(batch.rows, weights=batch.rows.weights * keep))
    options = LossOptions(decay=DECAY)
    loss = drafter(batch, target, options, float(normaliser)).loss
    loss.backward()
    errors = {
        name: float(
            (p.grad.float().cpu() - theirs["grads"][name]).norm() / theirs["grads"][name].norm()
        )
        for name, p in drafter.named_parameters()
        if p.grad is not None and name in theirs["grads"]
    }
    expected = sum(DECAY**k * float(x) for k, x in enumerate(theirs["plosses"]))
    return {
        "peer": theirs["impl"],
        "dtype": str(dtype),
        "loss": float(loss),
        "peer_loss": expected,
        "loss_error": abs(float(loss) - expected) / abs(expected),
        "gradient_error": max(errors.values()),
        "worst": max(errors, key=lambda name: errors[name]),
        "compared": len(errors),
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("dump", type=Path)
    parser.add_argument("--drivers", type=Path, required=True)
    parser.add_argument("--ours-dtype", default="float64")
    own, rest = parser.parse_known_args()
    device = rest[rest.index("--device") + 1]
    print(json.dumps(compare(own.dump, rest, own.drivers, getattr(torch, own.ours_dtype), device)))
