"""Run a command that the kernel ends together with the process that started it.

    python die_with_parent.py PARENT_PID COMMAND [ARGUMENT ...]

A wrapper instead of subprocess's `preexec_fn`, which runs Python between fork and exec and can deadlock. The
request to the kernel (prctl(2), PR_SET_PDEATHSIG) survives the exec, so nothing of this stays in memory.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1  # <linux/prctl.h>


def main() -> None:
    parent_pid, command = int(sys.argv[1]), sys.argv[2:]
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    # The parent may have died before the request was made; then the kernel has nothing left to report.
    if os.getppid() != parent_pid:
        sys.exit(1)
    os.execvp(command[0], command)


if __name__ == "__main__":
    main()
