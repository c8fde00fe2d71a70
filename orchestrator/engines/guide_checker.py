"""Whether a guide compiles, found out in a process of its own, which a hostile guide may kill or hang.

GenAI compiles a guide inside the engine's step, and what it cannot compile ends the engine. So the engine takes only
guides that `engines.guides` has compiled and tried as a process before.
"""

from __future__ import annotations

import base64
import collections
import math
import signal
import subprocess
import time
from collections.abc import Sequence
from typing import NamedTuple

from orchestrator import contracts
from orchestrator.engines import TRY_AGAIN, EngineRefusal
from orchestrator.engines.worker import CommandReader

# Processor time, so that the verdict hangs little on how busy the machine is; two cores spend it in 2 s. A schema of 50
# properties needs 0.2 s, one of 350 (all that 16 KiB hold) 3 s.
COMPILE_LIMIT_S = 4.0
# Time on the clock: as long as a client may be kept in doubt, as compiling comes last of all on a busy machine.
COMPILE_TIMEOUT_S = 5.0
# For so long those who wait hear that a guide took too much time on the clock: that was the machine, not the guide.
CLOCK_VERDICT_S = 1.0
# Remembered verdicts; at 16 KiB for the largest guide, 16 MiB at most.
MAX_VERDICTS = 1024
# GenAI keeps every grammar that it ever compiled (3 MB for a schema of 16 KiB), so the process is renewed.
GUIDES_PER_PROCESS = 64

_NAME = contracts.GUIDED_DECODING_GUIDE.name


class Guide(NamedTuple):
    """What a text must follow: one of `parsing.GUIDE_TYPES`, and the guide itself (None for type json)."""

    type: str
    text: str | None

    def to_line(self) -> bytes:
        # base64 keeps a line below what a pipe holds, so that writing to an idle process never waits.
        return self.type.encode() + b" " + base64.b64encode((self.text or "").encode()) + b"\n"

    @classmethod
    def from_line(cls, line: bytes) -> Guide:
        guide_type, text = line.rstrip(b"\n").split(b" ")
        return cls(guide_type.decode(), base64.b64decode(text).decode() or None)


class Verdict(NamedTuple):
    """Why a guide is refused, or None; the memory that it takes compiled; until when on `time.monotonic` this holds."""

    refusal: str | None
    num_bytes: int = 0
    until_s: float = math.inf


class GuideChecker:
    """Asks the process that `command` starts, one guide at a time, and remembers its verdicts.

    The process says it is ready with a line of JSON, then answers each guide's line with {"refusal": text or null,
    "num_bytes": what it has grown by}.
    """

    def __init__(self, command: Sequence[str]) -> None:
        self._command = command
        self._verdicts: collections.OrderedDict[Guide, Verdict] = collections.OrderedDict()
        self._asked: Guide | None = None
        self._start()

    def knows(self, guide: Guide) -> bool:
        """Whether the verdict on `guide` is there already."""
        if guide in self._verdicts and time.monotonic() >= self._verdicts[guide].until_s:
            del self._verdicts[guide]
        return guide in self._verdicts

    def check(self, guide: Guide) -> bool:
        """Whether `guide` may be used; False when that is not known yet: ask again.

        Never waits. Raises `EngineRefusal` when the guide does not compile.
        """
        self._read()
        if self.knows(guide):
            self._verdicts.move_to_end(guide)
            refusal = self._verdicts[guide].refusal
            if refusal is not None:
                raise EngineRefusal(refusal)
            return True
        if self._is_ready and self._asked is None:
            self._asked = guide
            self._num_asked += 1
            try:
                self._stdin.write(guide.to_line())
            except BrokenPipeError:
                pass  # it is gone; the next read sees that
        return False

    def decide(self, guide: Guide, refusal: str | None) -> None:
        """Remember that `guide` is refused with this text, or with None that it may be used."""
        self._remember(guide, Verdict(refusal))

    def num_bytes(self, guide: Guide) -> int:
        """The memory that `guide` takes compiled, as it was measured; 0 when that is not known."""
        return self._verdicts.get(guide, Verdict(None)).num_bytes

    def _remember(self, guide: Guide, verdict: Verdict) -> None:
        self._verdicts[guide] = verdict
        if len(self._verdicts) > MAX_VERDICTS:
            self._verdicts.popitem(last=False)

    def close(self) -> None:
        self._stdin.close()
        self._process.kill()
        self._process.wait()
        self._stdout.close()

    def _start(self) -> None:
        self._process = subprocess.Popen(self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0)
        assert self._process.stdin and self._process.stdout
        self._stdin = self._process.stdin
        self._stdout = self._process.stdout
        self._answers = CommandReader(self._stdout.fileno())
        self._is_ready = False
        self._num_asked = 0

    def _read(self) -> None:
        for answer in self._answers.read(wait=False):
            if self._asked is None:
                self._is_ready = True
            else:
                self._remember(self._asked, Verdict(answer["refusal"], answer["num_bytes"]))
                self._asked = None
        if self._answers.is_closed or (self._asked is None and self._num_asked == GUIDES_PER_PROCESS):
            was_ready = self._is_ready
            self.close()
            if self._asked is not None:
                self._remember(self._asked, self._explain_death())
                self._asked = None
            self._start()
            if not was_ready:
                raise EngineRefusal(f"{_NAME}: the process that compiles guides does not start; its log says why")

    def _explain_death(self) -> Verdict:
        status = self._process.returncode
        if status == -signal.SIGALRM:
            refusal = f"{_NAME}: takes more than {COMPILE_TIMEOUT_S:g} s to compile, on a busy machine; {TRY_AGAIN}"
            return Verdict(refusal, until_s=time.monotonic() + CLOCK_VERDICT_S)
        if status == -signal.SIGPROF:
            limit = f"{COMPILE_LIMIT_S:g} s of processor time"
            return Verdict(f"{_NAME}: takes more than {limit} to compile; make it simpler")
        return Verdict(f"{_NAME}: cannot be compiled (its compiler ended with status {status})")
