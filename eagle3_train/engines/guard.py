"""Ends vLLM's processes when the process that owns the engine ends, however it ends.

vLLM's core survives a killed parent and would keep its GPU memory from the replica that replaces it. A shell
waits on a pipe that only the owner holds open.
"""

from __future__ import annotations

import multiprocessing
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

_SCRIPT = 'read -r _; kill -9 "$@" 2>/dev/null'


@contextmanager
def guarded() -> Iterator[None]:
    """Watch over the children this process has now, until the block ends: it has stopped them in order."""
    pids = [str(child.pid) for child in multiprocessing.active_children()]
    command = ["/bin/sh", "-c", _SCRIPT, "guard", *pids]
    with subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True) as shell:
        yield
        shell.kill()
