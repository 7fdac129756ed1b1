"""A killed owner takes its engine's processes along; an orderly one leaves its other children alone."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

OWNER = """
import multiprocessing, sys, time
from eagle3_train.engines.guard import guarded

if __name__ == "__main__":
    child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,))
    child.start()
    with guarded():
        if sys.argv[1] == "watch":
            print(child.pid, flush=True)
            time.sleep(60)
    print(child.pid, flush=True)
    time.sleep(60)
"""


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    with open(f"/proc/{pid}/stat") as stat:  # noqa: PTH123 - the process may vanish
        return stat.read().split()[2] != "Z"


@pytest.mark.parametrize(("mode", "survives"), [("watch", False), ("release", True)])
def test_children_end_with_a_killed_owner_unless_released(mode: str, survives: bool) -> None:
    owner = subprocess.Popen([sys.executable, "-c", OWNER, mode], stdout=subprocess.PIPE)
    assert owner.stdout is not None
    child = int(owner.stdout.readline())
    owner.send_signal(signal.SIGKILL)
    owner.wait()
    owner.stdout.close()
    deadline = time.monotonic() + (2 if survives else 10)
    while alive(child) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert alive(child) == survives
    if survives:
        os.kill(child, signal.SIGKILL)
