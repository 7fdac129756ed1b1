"""Sharded over two ranks with FSDP2, one step equals one process training on both packs."""

import os
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.fsdp import fully_shard

from eagle3_train.drafter.losses import LossOptions
from eagle3_train.training.optim import AdamW
from tests.unit.drafter_cases import (
    MASKS,
    llama_spec,
    make_document,
    make_drafter,
    make_target,
    pack,
)

STEPS = 3
WINDOWS = (
    (MASKS[:2], MASKS[2:]),
    (MASKS[:3], ([0, 0, 0, 0],)),
)  # the second rank idles in the second step


def windows(spec):
    """Per step, the pack of each rank."""
    documents = [
        [
            [make_document(spec, mask, 10 * r + i) for i, mask in enumerate(masks)]
            for r, masks in enumerate(window)
        ]
        for window in WINDOWS
    ]
    return [[pack(d, STEPS).to("cpu", torch.float32) for d in ranks] for ranks in documents]


def rank_main(rank: int, folder: str) -> None:
    store = dist.FileStore(str(Path(folder) / "store"), 2)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=60)
    )
    torch.set_num_threads(1)
    spec = llama_spec()
    drafter = make_drafter(spec).float()
    fully_shard(drafter, reshard_after_forward=False)
    optimizer = AdamW(drafter.parameters(), lr=1e-2, max_grad_norm=0.01)
    target = make_target(spec).to("cpu", torch.float32)
    for packs in windows(spec):
        batch = packs[rank]
        (2 * drafter(batch, target, LossOptions(), 9.0).loss).backward()
        norm = optimizer.step()
        optimizer.zero_grad()
    full = {key: p.full_tensor().detach() for key, p in drafter.named_parameters()}
    if rank == 0:
        torch.save({"norm": norm, "parameters": full}, Path(folder) / "result.pt")
    dist.destroy_process_group()
    # FSDP keeps the group, and with it gloo's threads. One that lets go of a tensor while Python
    # shuts down aborts the process (pytorch/pytorch#190489), so leave without that shutdown.
    os._exit(0)


def test_two_ranks_equal_one_process_with_both_packs_also_when_one_has_no_rows(tmp_path):
    os.environ["OMP_NUM_THREADS"] = "1"
    mp.spawn(rank_main, args=(str(tmp_path),), nprocs=2)
    result = torch.load(tmp_path / "result.pt")
    spec = llama_spec()
    drafter, target = make_drafter(spec).float(), make_target(spec).to("cpu", torch.float32)
    optimizer = AdamW(drafter.parameters(), lr=1e-2, max_grad_norm=0.01)
    for packs in windows(spec):
        for batch in packs:
            drafter(batch, target, LossOptions(), 9.0).loss.backward()
        norm = optimizer.step()
        optimizer.zero_grad()
    torch.testing.assert_close(result["norm"], norm, rtol=1e-4, atol=1e-6)
    for key, parameter in drafter.named_parameters():
        torch.testing.assert_close(
            result["parameters"][key], parameter.detach(), rtol=1e-3, atol=2e-5
        )
