"""What others use of the machine."""

from __future__ import annotations

import os
import subprocess
import sys
import time

from perf.processes import Others, busy_s, descendants, processor_s

BURN = "import time\nend = time.monotonic() + 0.6\nwhile time.monotonic() < end: pass"


def test_what_we_use_is_not_others() -> None:
    """However busy the machine is: what burned below us is in the whole and not in the others' part."""
    others, used_s, began_s = Others(), busy_s(), time.monotonic()
    with subprocess.Popen([sys.executable, "-c", BURN + "\ninput()"], stdin=subprocess.PIPE) as child:
        time.sleep(0.8)
        assert child.pid in set(descendants(os.getpid()))
        ours_s = processor_s(child.pid)
        others_s = others.cores() * (time.monotonic() - began_s)
        all_s = busy_s() - used_s
        child.kill()
    assert ours_s > 0.1
    assert all_s - others_s >= 0.7 * ours_s


def test_a_process_that_is_not_ours_is_counted() -> None:
    others = Others()
    # Its parent ends at once, so that it is nobody's child here.
    orphan = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {BURN!r}])"
    subprocess.run([sys.executable, "-c", orphan], check=True)
    time.sleep(0.7)
    assert others.cores() > 0.2
