"""Ends vLLM's processes when the process that owns the engine ends, however it ends.

vLLM's core survives a killed parent and would keep its GPU memory from the replica that replaces it. A shell
waits on a pipe that only the owner holds open.
"""

from __future__ import annotations

import multiprocessing
import subprocess

_SCRIPT = 'read -r _; kill -9 "$@" 2>/dev/null'


class Guard:
    """Watches over the children this process has now."""

    def __init__(self) -> None:
        pids = [str(child.pid) for child in multiprocessing.active_children()]
        self._shell = (
            subprocess.Popen(
                ["/bin/sh", "-c", _SCRIPT, "guard", *pids],
                stdin=subprocess.PIPE,
                start_new_session=True,
            )
            if pids
            else None
        )

    def release(self) -> None:
        """Stop watching; the children have been stopped in order."""
        if self._shell is not None:
            self._shell.kill()
            self._shell.wait()
            self._shell = None
