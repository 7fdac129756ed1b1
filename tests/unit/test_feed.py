"""The feed: packs in order and whole, however many parts they came in; errors reach the step."""

import time
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from eagle3_train.records import Pack, Sample
from eagle3_train.stream.pipeline import CapturedPack
from eagle3_train.training.feed import FeedShape, feed

SHAPE = FeedShape(torch.device("cpu"), torch.float32, aux=6, hidden=2)
SAMPLES = [
    Sample(str(n), "test", np.arange(4 + n, dtype=np.int32), np.arange(4 + n) >= 1)
    for n in range(3)
]  # 3, 4 and 5 captured tokens
STATES = np.arange(12 * 8, dtype=np.float32).reshape(12, 8)


def documents(pack: Pack) -> tuple[list[Sample], int]:
    return [SAMPLES[row] for _, row in pack.entries], 2


def pack(number: int) -> Pack:
    return Pack(number, 0, 0, ((0, 0), (0, 1), (0, 2)), 12)


def test_parts_are_put_back_into_the_packs_order() -> None:
    whole = CapturedPack(pack(0), [(STATES, [0, 1, 2])], {})
    parts = [
        (np.concatenate([STATES[7:], STATES[:3]]), [2, 0]),  # from the cache
        (STATES[3:7], [1]),
    ]
    for fed in feed(iter([whole, CapturedPack(pack(1), parts, {})]), documents, SHAPE):
        batch = fed.batch
        got = torch.cat([batch.aux_hidden_states, batch.last_hidden_states], dim=1)
        torch.testing.assert_close(got, torch.from_numpy(STATES))
        assert batch.rows.counts == (9, 6)


def test_bf16_travels_as_int16_and_bad_samples_supervise_nothing() -> None:
    halves = torch.from_numpy(STATES).bfloat16()
    captured = CapturedPack(pack(0), [(halves.view(torch.int16).numpy(), [0, 1, 2])], {1: "nan"})
    (fed,) = feed(iter([captured]), documents, SHAPE)
    torch.testing.assert_close(fed.batch.aux_hidden_states, halves.float()[:, :6])
    assert fed.batch.rows.counts == (6, 4)


def test_an_error_of_the_stream_is_raised_after_the_packs_before_it() -> None:
    def broken() -> Iterator[CapturedPack]:
        yield CapturedPack(pack(0), [(STATES, [0, 1, 2])], {})
        raise ConnectionError("the coordinator is gone")

    packs = feed(broken(), documents, SHAPE)
    assert next(packs).pack.window == 0
    with pytest.raises(ConnectionError, match="is gone"):
        next(packs)


def test_only_one_pack_is_made_ready_beside_the_one_in_use() -> None:
    loaded = []

    def counted(one: Pack) -> tuple[list[Sample], int]:
        loaded.append(one.window)
        return documents(one)

    whole = [CapturedPack(pack(n), [(STATES, [0, 1, 2])], {}) for n in range(4)]
    packs = feed(iter(whole), counted, SHAPE)
    for number in range(3):
        assert next(packs).pack.window == number
        time.sleep(0.1)  # a feed that ran further ahead would have done so by now
        assert loaded == list(range(number + 2))


def test_an_empty_pack_keeps_its_place() -> None:
    (fed,) = feed(iter([CapturedPack(Pack(0, 1, 0, (), 0), [], {})]), documents, SHAPE)
    assert fed.batch.aux_hidden_states.shape == (0, 6)
    assert fed.batch.rows.counts == (0, 0)
