"""Training on a target's real states: does fp8 cost loss?

  python benchmarks/step_real.py --target models/smollm2-135m-instruct --rollout runs/demo/rollout --steps 500 plain fp8 plain@1

A variant is plain, fp8 or, naming the products that sum fast, fp8:[forward+input+weight], then [@SEED]; the seed orders the
data, so plain and plain@1 show what noise is. States are captured with Transformers once and kept in --cache;
`--device cuda --dtype bfloat16` trains on a GPU. Prints one JSON line per variant: mean loss by fifth of the run, held-out loss and expected acceptance length before
and after.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.step_ours import in_fp8
from eagle3_train.config import DrafterConfig
from eagle3_train.corpus.table import read_samples
from eagle3_train.corpus.vocab import most_supervised
from eagle3_train.drafter.frozen import FrozenTarget
from eagle3_train.drafter.losses import LossOptions
from eagle3_train.drafter.model import Eagle3Drafter, init_from_target
from eagle3_train.drafter.rows import PackedBatch, plan_rows
from eagle3_train.drafter.spec import DrafterSpec
from eagle3_train.drafter.walk import walk_batch
from eagle3_train.target.derive import drafter_spec
from eagle3_train.target.facts import read_facts
from eagle3_train.training.optim import AdamW, learning_rate

Document = dict[str, Tensor]


def capture(options: argparse.Namespace) -> dict[str, Any]:
    """Ids, mask and states of up to `--limit` answers, and the target's tensors; from `--cache` when it is there."""
    if options.cache.exists():
        return torch.load(options.cache)  # type: ignore[no-any-return]
    from transformers import AutoModelForCausalLM

    kept = getattr(torch, options.dtype)
    samples = list(read_samples(options.rollout / "samples"))[: options.limit]
    model = AutoModelForCausalLM.from_pretrained(options.target, dtype=torch.float32).eval()
    model = model.to(options.device)
    layers = model.config.num_hidden_layers
    documents = []
    for sample in samples:
        ids = torch.tensor(sample.input_ids)
        with torch.no_grad():
            out = model.model(ids[None, :-1].to(options.device), output_hidden_states=True)
        aux = torch.cat([out.hidden_states[b][0] for b in (2, layers // 2, layers - 3)], -1)
        last = out.last_hidden_state[0]  # after the final norm
        states = {"aux": aux.to(kept), "last": last.to(kept)}
        mask = torch.tensor(sample.loss_mask)
        documents.append({"ids": ids, "mask": mask} | states)
    model = model.cpu()
    drafted, _ = most_supervised(samples, options.draft_vocab, model.config.vocab_size, ())
    found = {
        "documents": documents,
        "embed": model.get_input_embeddings().weight.detach(),
        "head": model.lm_head.weight.detach(),
        "norm": model.model.norm.weight.detach(),
        "eps": model.config.rms_norm_eps,
        "d2t": torch.from_numpy(drafted - np.arange(len(drafted))),
    }
    torch.save(found, options.cache)
    return found


def batch_of(documents: list[Document], steps: int, device: str, dtype: torch.dtype) -> PackedBatch:
    """Documents packed on the device."""
    plan = plan_rows(
        [d["ids"].numpy() for d in documents], [d["mask"].numpy() for d in documents], steps
    )
    aux, last = (torch.cat([d[key] for d in documents]) for key in ("aux", "last"))
    return PackedBatch(plan, aux, last).to(device, dtype)


def packs_of(documents: list[Document], tokens: int, seed: int, steps: int) -> list[list[Document]]:
    """`steps` packs of about `tokens` states, epochs in their own order."""
    g, packs, pack = np.random.default_rng(seed), [], []
    while len(packs) < steps:
        for i in g.permutation(len(documents)):
            pack.append(documents[int(i)])
            if sum(len(d["last"]) for d in pack) >= tokens:
                packs.append(pack)
                pack = []
    return packs[:steps]


def held_out(
    drafter: Eagle3Drafter, batch: PackedBatch, target: FrozenTarget
) -> tuple[float, float]:
    """Loss per supervised start and expected acceptance length."""
    out, walked = walk_batch(drafter, target, batch, normaliser=float(batch.rows.supervised_starts))
    return round(float(out.loss), 4), round(float(walked.expected_length[batch.rows.steps - 1]), 4)


def train(
    variant: str, data: dict[str, Any], spec: DrafterSpec, options: argparse.Namespace
) -> dict[str, object]:
    """One drafter from initialisation to the last step."""
    name, _, seed = variant.partition("@")
    device, dtype = options.device, getattr(torch, options.dtype)
    target = FrozenTarget(data["embed"], data["head"], None, data["eps"], data["d2t"])
    drafter = Eagle3Drafter(spec, fp8=in_fp8(name))
    init_from_target(drafter, target, torch.Generator().manual_seed(0))
    with torch.no_grad():  # the captured states are normed already, what the drafter makes is not
        drafter.norm.weight.copy_(data["norm"])
    drafter, target = drafter.to(device, dtype), target.to(device, dtype)
    documents = data["documents"]
    test = batch_of(documents[::10], options.ttt, device, dtype)
    training = [d for i, d in enumerate(documents) if i % 10]
    optimizer = AdamW(drafter.parameters(), lr=options.lr)
    before, losses, started = held_out(drafter, test, target), [], time.monotonic()
    for step, pack in enumerate(packs_of(training, options.tokens, int(seed or 0), options.steps)):
        batch = batch_of(pack, options.ttt, device, dtype)
        loss = drafter(
            batch, target, LossOptions(), float(max(batch.rows.supervised_starts, 1))
        ).loss
        loss.backward()
        rate = learning_rate(step + 1, peak=options.lr, warmup=20, total=options.steps, floor=0.1)
        optimizer.set_lr(rate)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    means = torch.stack(losses).float().split(max(1, options.steps // 5))
    after = held_out(drafter, test, target)
    return {
        "variant": variant,
        "loss_by_fifth": [round(float(part.mean()), 4) for part in means],
        "held_out_loss": [before[0], after[0]],
        "expected_length": [before[1], after[1]],
        "seconds": round(time.monotonic() - started, 1),
    }


def main() -> None:
    """Capture once, train every variant, print a line each."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("variants", nargs="*", help="none: only capture")
    parser.add_argument("--target", type=Path, required=True)
    parser.add_argument("--rollout", type=Path, required=True)
    parser.add_argument("--cache", type=Path, default=Path("/tmp/step-real.pt"))
    parser.add_argument("--draft-vocab", type=int, default=4096)
    parser.add_argument("--limit", type=int, default=1_000_000)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--tokens", type=int, default=250)
    parser.add_argument("--ttt", type=int, default=3)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    options = parser.parse_args()
    data = capture(options)
    config = DrafterConfig(draft_vocab_size=len(data["d2t"]))
    spec = drafter_spec(read_facts(options.target), config)
    for variant in options.variants:
        print(json.dumps(train(variant, data, spec, options)), flush=True)


if __name__ == "__main__":
    main()
