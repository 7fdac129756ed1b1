"""States on their way: FP8 rows hold what they say, cost what the plan says, and cannot hide a NaN."""

import pytest
import torch

from eagle3_train.config import StateType
from eagle3_train.stream.states import checksum, decode, encode, storage
from eagle3_train.target.facts import bytes_per_token

TYPES: list[StateType] = ["float32", "bfloat16", "float8_e4m3fn"]
HIDDEN = 24


def states(seed: int = 0) -> torch.Tensor:
    """[5 tokens, 3 boundaries, HIDDEN]: boundaries of very different scale, some outliers."""
    drawn = torch.randn(5, 3, HIDDEN, generator=torch.Generator().manual_seed(seed))
    drawn[..., 0] *= 40
    return drawn * torch.tensor([1e-3, 1.0, 3e4])[:, None]


def stored(values: torch.Tensor, dtype: StateType) -> torch.Tensor:
    kind, columns = storage(dtype, HIDDEN)
    out = torch.empty(*values.shape[:-1], columns, dtype=kind)
    encode(values, out)
    return out


@pytest.mark.parametrize("dtype", TYPES)
def test_a_token_takes_the_bytes_that_are_planned_for_it(dtype: StateType) -> None:
    out = stored(states(), dtype)
    assert out.nbytes == len(out) * bytes_per_token(HIDDEN, 3, dtype)


def test_fp8_rounds_each_value_to_a_sixteenth_and_each_row_by_its_own_scale() -> None:
    values = states()
    back = decode(stored(values, "float8_e4m3fn").flatten(1), HIDDEN, torch.float32)
    back = back.view_as(values)
    smallest = values.abs().amax(-1, keepdim=True) / 448 / 1024
    assert ((back - values).abs() <= torch.maximum(values.abs() / 16, smallest)).all()
    again = decode(stored(values, "float8_e4m3fn").flatten(1), HIDDEN, torch.bfloat16)
    torch.testing.assert_close(again.float(), back.flatten(1), rtol=2**-8, atol=0)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
def test_the_checksum_tells_of_a_value_that_is_not_finite(dtype: StateType, wrong: float) -> None:
    values = states()
    assert checksum(stored(values, dtype)).isfinite()
    values[3, 1, 7] = wrong
    assert not checksum(stored(values, dtype)).isfinite()
