"""Conversations that a tier answered poorly, kept for the classifier's next training where their tenant allows it.

Of single poor answers many are only different ones. So a case counts when its tier, or its cluster of questions, is
doubtful; the others wait for that, and leave first.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, ValidationError

from orchestrator.config import Row
from orchestrator.files import write_whole
from orchestrator.routing.complexity import TIERS

log = logging.getLogger("orchestrator.quality")

CASES_FILE = "quality-cases.json"
MAX_CASES = 1000
# Of a conversation's JSON; a longer one is not kept, a cut one would be another question.
MAX_CASE_BYTES = 16 << 10
_DAY_S = 86400.0


class Message(Row):
    """As a line of `build/data/router.jsonl` has it."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str


class Case(Row):
    """`label` is the tier above the one that failed; `at_s` in seconds since 1970. `counts`: its tier was doubtful."""

    tenant: str
    tier: str
    cluster: int | None
    label: Literal["simple", "medium", "complex", "expert"]
    messages: Annotated[tuple[Message, ...], Field(strict=False, min_length=1)]
    at_s: float
    counts: bool = False


class CaseFile(Row):
    version: Literal[1] = 1
    cases: Annotated[list[Case], Field(max_length=MAX_CASES)]


class Cases:
    """For one thread. Without a path nothing is kept beyond this process."""

    def __init__(self, path: Path | None, keep_days: float) -> None:
        self._path = path
        self._keep_s = keep_days * _DAY_S
        self._cases = [] if path is None else read_cases(path)
        self._is_changed = False

    def __len__(self) -> int:
        return len(self._cases)

    def add(self, case: Case) -> None:
        if sum(len(message.content.encode("utf-8", "replace")) for message in case.messages) > MAX_CASE_BYTES:
            return
        self._cases.append(case)
        if len(self._cases) > MAX_CASES:
            self._cases.remove(next((each for each in self._cases if not each.counts), self._cases[0]))
        self._is_changed = True

    def count(self, tier: str, cluster: int | None) -> None:
        """The cases of a tier, or of it in one cluster, count from now on."""
        self._cases = [
            case.model_copy(update={"counts": True}) if case.tier == tier and cluster in (None, case.cluster) else case
            for case in self._cases
        ]
        self._is_changed = True

    def forget_old(self, now_s: float) -> None:
        kept = [case for case in self._cases if now_s - case.at_s < self._keep_s]
        self._is_changed |= len(kept) != len(self._cases)
        self._cases = kept

    def forget_others(self, may_keep: Callable[[str], bool]) -> None:
        """Those of tenants that do not, or no longer, allow it."""
        allowed = {tenant: may_keep(tenant) for tenant in {case.tenant for case in self._cases}}
        kept = [case for case in self._cases if allowed[case.tenant]]
        self._is_changed |= len(kept) != len(self._cases)
        self._cases = kept

    def take_changes(self) -> CaseFile | None:
        """What to write; None if that is what was written last."""
        if not self._is_changed or self._path is None:
            return None
        self._is_changed = False
        return CaseFile(cases=self._cases)

    def write(self, file: CaseFile) -> None:
        """Raises `OSError`."""
        if self._path is not None:
            write_whole(self._path, file.model_dump_json())


def read_cases(path: Path) -> list[Case]:
    """None where there is no file and, with a warning, where it cannot be read."""
    try:
        return CaseFile.model_validate_json(path.read_bytes()).cases
    except FileNotFoundError:
        return []
    except (OSError, ValidationError) as error:
        log.warning("%s: cannot be read (%s); its cases are lost", path, type(error).__name__)  # its text is a tenant's
        return []


def make_case(
    tenant: str, tier: str, cluster: int | None, tiers: Sequence[str], turns: Iterable[tuple[str, str]], at_s: float
) -> Case | None:
    """`tiers` are all, from cheap to dear; `turns` are role and text. None where the classifier has no such label."""
    place = list(tiers).index(tier) + 1
    if place >= len(tiers) or tiers[place] not in TIERS:
        return None
    messages = [{"role": "system" if role == "developer" else role, "content": text} for role, text in turns]
    return Case.model_validate(
        {
            "tenant": tenant,
            "tier": tier,
            "cluster": cluster,
            "label": tiers[place],
            "messages": messages,
            "at_s": at_s,
        }
    )


def training_lines(cases: Iterable[Case]) -> Iterable[str]:
    """Those that count, as `python -m build router --add` reads them, each conversation once."""
    seen = set()
    for case in cases:
        row = {"messages": [message.model_dump() for message in case.messages], "tier": case.label, "domain": "quality"}
        line = json.dumps(row, ensure_ascii=False)
        if case.counts and line not in seen:
            seen.add(line)
            yield line
