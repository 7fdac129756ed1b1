"""Parquet shards of samples: written whole or not at all, read in order of their index."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from eagle3_train.records import Sample
from eagle3_train.rundir import write_atomic

SCHEMA = pa.schema(
    [
        ("id", pa.string()),
        ("domain", pa.string()),
        ("input_ids", pa.list_(pa.int32())),
        ("loss_mask", pa.list_(pa.bool_())),
        ("finish_reason", pa.string()),
        ("messages_json", pa.string()),
    ]
)


def write_shard(dir: Path, samples: Sequence[Sample], messages_json: Sequence[str]) -> None:
    """Commit one more shard: a crash leaves it absent or complete."""
    shards = _shards(dir)
    index = int(shards[-1].stem.split("-")[1]) + 1 if shards else 0
    assert all(len(sample.input_ids) == len(sample.loss_mask) for sample in samples)
    *own, messages = SCHEMA.names
    columns: dict[str, Sequence[Any]] = {
        name: [getattr(sample, name) for sample in samples] for name in own
    }
    columns[messages] = messages_json
    file = pa.BufferOutputStream()
    pq.write_table(pa.table(columns, schema=SCHEMA), file, compression="zstd")
    write_atomic(dir / f"samples-{index:06d}.parquet", file.getvalue().to_pybytes())


def committed_ids(dir: Path) -> set[str]:
    """Ids in all committed shards of `dir`; empty when there is no folder yet."""
    ids: set[str] = set()
    for shard in _shards(dir):
        ids.update(pq.read_table(shard, columns=["id"])["id"].to_pylist())
    return ids


def read_samples(dir: Path) -> list[Sample]:
    """All samples of `dir` in shard order. Raises ValueError for a repeated id or no shard at all."""
    shards = _shards(dir)
    if not shards:
        raise ValueError(f"no sample shards in {dir}; run the rollout stage first")
    samples: list[Sample] = []
    seen: set[str] = set()
    for shard in shards:
        for sample in _read(shard):
            if sample.id in seen:
                raise ValueError(f"{shard} repeats sample {sample.id}; delete the shard and resume")
            seen.add(sample.id)
            samples.append(sample)
    return samples


def read_messages(dir: Path) -> dict[str, str]:
    """messages_json of every sample, by id."""
    found: dict[str, str] = {}
    for shard in _shards(dir):
        table = pq.read_table(shard, columns=["id", "messages_json"])
        found.update(zip(table["id"].to_pylist(), table["messages_json"].to_pylist(), strict=True))
    return found


def _read(shard: Path) -> list[Sample]:
    """Samples of one shard; ids and masks are views into two flat arrays."""
    table = pq.read_table(shard, schema=SCHEMA).combine_chunks()
    lists = table["input_ids"].combine_chunks()
    borders = lists.offsets.to_numpy()[1:-1]
    masks = table["loss_mask"].combine_chunks().values.to_numpy(zero_copy_only=False)
    columns = (
        table["id"].to_pylist(),
        table["domain"].to_pylist(),
        np.split(lists.values.to_numpy(), borders),
        np.split(masks, borders),
        table["finish_reason"].to_pylist(),
    )
    return [Sample(*row) for row in zip(*columns, strict=True)]


def _shards(dir: Path) -> list[Path]:
    return sorted(dir.glob("samples-*.parquet"))
