"""The child processes of `serve`: started with a log file, watched, stopped, never left behind."""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from orchestrator.triton import cleaner

POLL_INTERVAL_S = 0.05
LOG_TAIL_LINES = 30
_MAX_TAIL_BYTES = 1 << 18  # what Triton says of its start and its end, without the tens of MiB that lie between
# A line of a request is some 500 bytes; with the file before it at most twice as much is on disk.
MAX_LOG_BYTES = 64 << 20


class StartError(Exception):
    """Something the operator must fix before (or because) `serve` cannot run; the text says what and how."""


class ChildDied(StartError):
    """Triton, the gateway or the gRPC front ended although nobody asked it to."""


class Cleaner:
    """Sees to it that nothing is left when its block ends, or this process does, however that happens.

    `shm_prefix` is a prefix for names in /dev/shm that no other server uses; see `cleaner` for the rest.
    """

    def __init__(self) -> None:
        self.shm_prefix = f"triton-realtime-{os.getpid()}-{secrets.token_hex(4)}-"

    def __enter__(self) -> Cleaner:
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", cleaner.__file__, self.shm_prefix],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        return self

    def __exit__(self, *exc: object) -> None:
        self._process.communicate()

    def watch(self, child: Child) -> None:
        """Have the child's whole process group killed at the end."""
        self._tell(child.pid)

    def forget(self, child: Child) -> None:
        """It is gone: its number may soon be another process'."""
        self._tell(-child.pid)

    @staticmethod
    def remove_shared_memory(prefix: str) -> None:
        """What a child has left in /dev/shm; `prefix` is a longer one than everybody's."""
        for region in Path("/dev/shm").glob(f"{prefix}*"):
            region.unlink(missing_ok=True)

    def _tell(self, number: int) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(b"%d\n" % number)
        self._process.stdin.flush()


class Child:
    """A running child. Its stdout and stderr go to `log`; it leads its own process group.

    An own group, because Ctrl-C reaches every process of the terminal's group at once, and the children must
    end in order; and because a hard stop must also reach what a child has started (Triton's Python stubs).
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        log: Path,
        env: Mapping[str, str] | None = None,
        folder: Path | None = None,
    ) -> None:
        self.name = name
        self.log = log
        self._needed: dict[int, str] = {}
        self._is_asked_to_end = False
        log.write_bytes(b"")
        with log.open("ab") as sink:  # to append, so that what is written after `rotate_log` lies at the beginning
            self._process = subprocess.Popen(
                command,
                env=env,
                cwd=folder,
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    def is_running(self) -> bool:
        return self._process.poll() is None

    def fate(self) -> str | None:
        """None while all is well; else how it ended, with the last lines of its log.

        A process that lost a needed child is killed here: nobody who waits for it would get an answer.
        """
        if self.is_running():
            lost = [command for pid, command in self._needed.items() if not _is_alive(pid)]
            if not lost:
                return None
            os.killpg(self.pid, signal.SIGKILL)
            self._process.wait()
            return f"{self.name} (pid {self.pid}) was killed, because it lost its child {lost[0]}\n{self._last_lines()}"
        code = self._process.returncode
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        return f"{self.name} (pid {self.pid}) {how}\n{self._last_lines()}"

    def needs_its_children(self, generations: int = 1) -> None:
        """From now on the death of a process that it has started counts as its own; of theirs too, with 2 generations.

        Triton waits forever for a Python model's process that was killed, and calls the model ready meanwhile.
        """
        pids = _children(self.pid)
        for _ in range(generations - 1):
            pids += [child for pid in pids for child in _children(pid)]
        # Two words of the command line tell them apart: program, and for a stub its model.
        self._needed = {
            pid: " ".join(_read_or_empty(Path("/proc", str(pid), "cmdline")).split("\0")[:2]) for pid in pids
        }

    def rotate_log(self) -> None:
        """Move a log of `MAX_LOG_BYTES` to NAME.log.1, in place of the one before.

        Copied and emptied, since the children hold it open: a line that comes just then may be lost.
        """
        if self.log.stat().st_size >= MAX_LOG_BYTES:
            shutil.copyfile(self.log, self.log.with_name(f"{self.log.name}.1"))
            os.truncate(self.log, 0)

    def move_log(self, log: Path) -> None:
        """What it writes, and has written, is in `log` from now on."""
        self.log.replace(log)
        self.log = log

    def ask_to_end(self) -> None:
        """SIGTERM, once: to some programs a second one says to hurry."""
        if not self._is_asked_to_end and self.is_running():
            self._process.send_signal(signal.SIGTERM)
        self._is_asked_to_end = True

    def stop(self, timeout_s: float, is_urgent: Callable[[], bool] = lambda: False) -> None:
        """Ask it to end, then wait; SIGKILL to the whole group after `timeout_s`, or as soon as `is_urgent()`."""
        self.ask_to_end()
        deadline_s = time.monotonic() + timeout_s
        while self.is_running() and time.monotonic() < deadline_s and not is_urgent():
            time.sleep(POLL_INTERVAL_S)
        try:
            os.killpg(self.pid, signal.SIGKILL)  # also when it ended by itself: it may have left children
        except ProcessLookupError:
            pass
        self._process.wait()

    def _last_lines(self) -> str:
        with self.log.open("rb") as log:
            log.seek(max(0, self.log.stat().st_size - _MAX_TAIL_BYTES))
            lines = log.read().decode(errors="replace").splitlines()
        # Triton draws its options as a table of 20 lines, which would push out the error before it.
        telling = [line for line in lines if not line.startswith(("|", "+-"))][-LOG_TAIL_LINES:]
        tail = "\n".join(f"  | {line}" for line in telling) or "  | (empty)"
        return f"last lines of {self.log}:\n{tail}"


def _children(pid: int) -> list[int]:
    listings = Path("/proc", str(pid), "task").glob("*/children")
    return [int(child) for listing in listings for child in _read_or_empty(listing).split()]


def _read_or_empty(path: Path) -> str:
    """The file's text; empty when the thread it describes has just ended."""
    try:
        return path.read_text()
    except (FileNotFoundError, ProcessLookupError):
        return ""


def _is_alive(pid: int) -> bool:
    """Whether the process exists and is no zombie (Triton does not collect the children it lost)."""
    stat = _read_or_empty(Path("/proc", str(pid), "stat"))
    return stat.rpartition(")")[2].split()[:1] not in ([], ["Z"])
