"""An engine hands over no states that are missing, of other tokens or not finite; a worker is played here."""

from concurrent.futures import Future

import pytest
import torch

from eagle3_train.engines.capture import Captures, StatesError
from eagle3_train.engines.handover import connect, view
from eagle3_train.records import Generation

IDS = (5, 6, 7, 8)


@pytest.mark.parametrize(
    ("ids", "said", "wrong"),
    [
        (IDS, "", ""),
        ((5, 6, 7, 9), "", "other tokens"),
        (IDS, "hidden states are not finite", "not finite"),
    ],
)
def test_wrong_states_fail_their_request_by_name(ids, said, wrong):
    captures = Captures((3, 16), "float32", 1 << 16, print)
    channel, arena = connect(**captures.handover.connector_config)
    future = Future()
    captures.expect("0", future, None)
    captures.generated("0", Generation("0", IDS[:3], (8, 2), "length", ""), True)
    key, place = channel.recv()
    assert (key, place.tokens) == ("0", 4)
    view(arena, place.ids, (4,), torch.int32).copy_(torch.tensor(ids))
    channel.send((key, said))
    if wrong:
        with pytest.raises(StatesError, match=wrong):
            future.result(10)
    else:
        captured = future.result(10).captured
        assert (captured.hidden.shape, captured.token_ids.tolist()) == ((4, 3, 16), list(IDS))
    captures.handover.close()
    channel.close()
