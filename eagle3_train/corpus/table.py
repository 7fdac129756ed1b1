"""Parquet shards of samples: written whole or not at all, read in order of their index."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from eagle3_train.records import Sample

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


def next_index(dir: Path) -> int:
    """Index of the first shard not yet committed."""
    shards = _shards(dir)
    return int(shards[-1].stem.split("-")[1]) + 1 if shards else 0


def write_shard(
    dir: Path, index: int, samples: Sequence[Sample], messages_json: Sequence[str]
) -> None:
    """Commit one shard: a crash leaves it absent or complete. Raises ValueError when it exists."""
    path = dir / f"samples-{index:06d}.parquet"
    if path.exists():
        raise ValueError(f"{path} is already committed; use next_index({dir})")
    assert len(samples) == len(messages_json), "one messages_json per sample"
    for sample in samples:
        assert len(sample.input_ids) == len(sample.loss_mask), (
            f"mask of {sample.id} has another length"
        )
    columns = [
        [sample.id for sample in samples],
        [sample.domain for sample in samples],
        [sample.input_ids for sample in samples],
        [sample.loss_mask for sample in samples],
        [sample.finish_reason for sample in samples],
        list(messages_json),
    ]
    table = pa.table(
        [pa.array(column, type=f.type) for column, f in zip(columns, SCHEMA, strict=True)],
        schema=SCHEMA,
    )
    dir.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with temporary.open("wb") as file:
        pq.write_table(table, file, compression="zstd")
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


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
    offsets = lists.offsets.to_numpy()
    ids = lists.values.to_numpy()
    mask = (
        table["loss_mask"].combine_chunks().values.to_numpy(zero_copy_only=False).astype(np.bool_)
    )
    names, domains, reasons = (table[c].to_pylist() for c in ("id", "domain", "finish_reason"))
    return [
        Sample(name, domain, ids[start:end], mask[start:end], reason)
        for name, domain, reason, start, end in zip(
            names, domains, reasons, offsets[:-1], offsets[1:], strict=True
        )
    ]


def _shards(dir: Path) -> list[Path]:
    return sorted(dir.glob("samples-*.parquet"))
