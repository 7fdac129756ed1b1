"""An engine hands over no states that are missing, of other tokens or not finite; vLLM's cache is played here."""

from __future__ import annotations

from concurrent.futures import Future

import pytest
import torch

from eagle3_train.engines import versions
from eagle3_train.engines.capture import Captures, Completion, StatesError
from eagle3_train.records import Generation

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(120)]

IDS = (5, 6, 7, 8)


@pytest.mark.parametrize(
    ("ids", "value", "wrong"),
    [
        (IDS, 1.0, ""),
        (IDS[:3], 1.0, "3 tokens captured, 4 expected"),
        ((5, 6, 7, 9), 1.0, "other tokens"),
        (IDS, float("nan"), "not finite"),
    ],
)
def test_wrong_states_fail_their_request_by_name(
    ids: tuple[int, ...], value: float, wrong: str
) -> None:
    versions.prepare_environment(own_process=False, v1_runner=False)
    from eagle3_train.engines.connector import Copier, Save

    captures = Captures((3, 16), "float32", 1 << 16, print)
    cache = torch.full((2, 4, 3, 16), value)  # [blocks, block, boundaries, hidden]
    copier = Copier(cache, captures.handover.connector_config | {"dtype": "float32"})
    future: Future[Completion] = Future()
    captures.expect("0", future, None)
    captures.generated("0", Generation("0", IDS[:3], (8, 2), "length", ""), True)
    copier.start([Save("request", "0", list(ids), [1])])
    assert copier.finished() == {"request"}
    if wrong:
        with pytest.raises(StatesError, match=wrong):
            future.result(10)
    else:
        captured = future.result(10).captured
        assert captured is not None
        assert (captured.hidden.shape, captured.token_ids.tolist()) == ((4, 3, 16), list(IDS))
        assert (captured.hidden == value).all()
    captures.handover.close()
    copier.close()
