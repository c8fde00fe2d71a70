"""What the doctor says of one thing: that all is well, or what was found, what is wanted, and what mends it."""

from __future__ import annotations

from typing import NamedTuple


class Finding(NamedTuple):
    """`check` is what was looked at. Without a `fix` all is well; what `may_start` keeps nobody from starting.

    Whatever is not well has all three: what was found, what is wanted, and what mends it.
    """

    check: str
    found: str
    wanted: str = ""
    fix: str = ""
    may_start: bool = False

    @property
    def is_fault(self) -> bool:
        return bool(self.fix) and not self.may_start

    @property
    def text(self) -> str:
        """For people; the fix on a line of its own."""
        wanted = f"; wanted: {self.wanted}" if self.wanted else ""
        return f"{self.found}{wanted}" + (f"\nfix: {self.fix}" if self.fix else "")

    def as_line(self) -> str:
        """As the doctor prints it."""
        word = "FAIL" if self.is_fault else "warn" if self.fix else "ok"
        return f"{word:<5}{self.check:<12}" + self.text.replace("\n", f"\n{'':<17}")
