"""The epoch cache: a fixed subset within its bytes, shards that are checked, nothing on disk with a name."""

from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from eagle3_train.records import Sample
from eagle3_train.stream.cache import HEADER_BYTES, ShardFile, pin, planned_captures
from eagle3_train.stream.flight import StreamCounters
from eagle3_train.stream.meter import StreamMeter, bottleneck

TOKEN_BYTES = 64


def samples(count: int) -> list[Sample]:
    mask = np.ones(1, dtype=np.bool_)
    return [Sample(str(n), "test", np.zeros(2 + n % 7, dtype=np.int32), mask) for n in range(count)]


def states(tokens: int, seed: int) -> npt.NDArray[np.int16]:
    return np.random.default_rng(seed).integers(-9, 9, (tokens, 8)).astype(np.int16)


@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 0.9, 2.0])
def test_the_same_samples_are_pinned_every_time_and_fit_the_bytes(share: float) -> None:
    train = samples(100)
    sizes = np.array([s.captured_tokens * TOKEN_BYTES + HEADER_BYTES for s in train])
    budget = int(share * sizes.sum())
    pinned = pin(train, TOKEN_BYTES, budget, seed=3)
    np.testing.assert_array_equal(pinned, pin(train, TOKEN_BYTES, budget, seed=3))
    assert sizes[pinned].sum() <= budget
    assert pinned.all() == (share >= 1)
    if 0 < share < 1:
        assert sizes[pinned].sum() > budget - sizes.max(), "no room is left unused"


@pytest.mark.parametrize(("epochs", "cached"), [(1, 0), (1, 40), (5, 0), (5, 13), (5, 40)])
def test_captures_follow_the_formula(epochs: int, cached: int) -> None:
    pinned = np.arange(40) < cached
    assert planned_captures(pinned, epochs) == 40 * (1 + (epochs - 1) * (1 - cached / 40))


def test_stored_samples_come_back_as_they_were_and_the_file_has_no_name(tmp_path: Path) -> None:
    file = ShardFile(str(tmp_path))
    pack = states(30, 1)
    file.store(pack, [(4, 0, 10), (7, 10, 30)])
    file.store(states(5, 2), [(9, 0, 5)])
    loaded, (nbytes, found) = file.load([7, 1, 4])
    assert found == [7, 4]
    np.testing.assert_array_equal(loaded, np.concatenate([pack[10:], pack[:10]]))
    assert (loaded.dtype, nbytes) == (np.int16, loaded.nbytes)
    assert list(tmp_path.iterdir()) == []


def test_a_damaged_shard_is_absent_and_can_be_stored_again_in_its_place(tmp_path: Path) -> None:
    file = ShardFile(str(tmp_path))
    pack = states(30, 1)
    file.store(pack, [(0, 0, 10), (1, 10, 20), (2, 20, 30)])
    size = file._file.seek(0, 2)
    with Path(f"/proc/self/fd/{file._file.fileno()}").open("r+b") as disk:
        disk.seek(size // 2)
        disk.write(b"\xff\xff\xff")
    assert next(iter(file.load([1]))).size == 0  # type: ignore[union-attr]
    _, (_, found) = file.load([0, 1, 2])
    assert found == [0, 2]
    file.store(pack, [(1, 10, 20)])
    assert file._file.seek(0, 2) == size
    loaded, _ = file.load([1])
    np.testing.assert_array_equal(loaded, pack[10:20])


def test_rates_are_those_since_the_last_look(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 2.0, 2.0, 3.0, 3.0])
    monkeypatch.setattr("time.monotonic", lambda: next(clock))
    meter = StreamMeter()
    first = meter.read(StreamCounters(captured_tokens=100, delivered_total=50, capture_busy_s=1.0))
    assert first["stream/capture_tokens_per_s"] == 50
    later = meter.read(StreamCounters(captured_tokens=130, delivered_total=90, capture_busy_s=2.0))
    assert later["stream/capture_tokens_per_s"] == 30
    assert later["stream/bytes_per_s"] == 40
    assert later["stream/capture_busy_frac"] == 1.0


@pytest.mark.parametrize(
    ("wait", "busy", "named"),
    [(0.01, 1.0, "trainer"), (0.5, 1.0, "engines"), (0.5, 0.3, "max_bytes_in_flight")],
)
def test_the_bottleneck_is_named_with_what_to_change(wait: float, busy: float, named: str) -> None:
    assert named in bottleneck(wait, busy)
