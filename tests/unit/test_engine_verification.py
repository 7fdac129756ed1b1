"""An engine hands over no states that are missing, of other tokens or not finite; a worker is played here."""

from concurrent.futures import Future

import pytest
import torch

from eagle3_train.engines.capture import Captures, StatesError
from eagle3_train.engines.handover import connect
from eagle3_train.records import Generation

IDS = (5, 6, 7, 8)


@pytest.mark.parametrize(
    ("ids", "tokens", "finite", "wrong"),
    [
        (IDS, 4, True, ""),
        (IDS, 3, True, "3 tokens captured, 4 expected"),
        ((5, 6, 7, 9), 4, True, "other tokens"),
        (IDS, 4, False, "not finite"),
    ],
)
def test_wrong_states_fail_their_request_by_name(ids, tokens, finite, wrong):
    captures = Captures((3, 16), "float32", 1 << 16, print)
    channel, arena = connect(**captures.handover.connector_config)
    future = Future()
    captures.expect("0", future, None)
    captures.generated("0", Generation("0", IDS[:3], (8, 2), "length", ""), 4)
    grant = channel.receive()
    assert grant["tokens"] == 4
    arena.tensor(grant["ids"], (4,), torch.int32).copy_(torch.tensor(ids))
    channel.send(done="0", tokens=tokens, finite=finite)
    if wrong:
        with pytest.raises(StatesError, match=wrong):
            future.result(10)
    else:
        captured = future.result(10).captured
        assert (captured.hidden.shape, captured.token_ids.tolist()) == ((4, 3, 16), list(IDS))
    captures.handover.close()
    channel.close()
