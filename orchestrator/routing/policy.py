"""Which tier answers: the cheapest that is likely to suffice, has room, is in time, and is not out. Pure.

The budget has spoken before: a tier that the key's quotas cannot pay is no candidate. Where nothing satisfies all, the
choice gives up the least: first that the tier is cheap, then that it suffices, then that it is in time.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple

from orchestrator.routing.complexity import TIERS, Complexity

# Why a tier was chosen, in one word: for counting. `Decision.reason` is the sentence.
Lack = Literal["window", "tools", "unable"]
Kind = Literal[
    Lack, "pinned", "only", "suffices", "out", "deadline", "doubtful", "quota", "best", "unjudged", "unclassified"
]


class Candidate(NamedTuple):
    """A tier that may answer, as it stands now.

    `level` is the one of `TIERS` that it is good for. `num_answer_tokens` is the longest answer wanted, the prompt has
    `num_prompt_tokens`. `expected_s` is when the answer is expected to be whole, by the live pace of the tier's engine
    and its queue: 0 when nothing is known, infinite when it has no place. `is_out` says its circuit breaker,
    `is_doubtful` the quality monitor: its answers to such questions have been poor lately.
    """

    tier: str
    backend: str
    level: str
    context_window: int
    num_prompt_tokens: int
    num_answer_tokens: int
    expected_s: float = 0.0
    is_out: bool = False
    is_doubtful: bool = False

    @property
    def holds(self) -> bool:
        return self.num_prompt_tokens + self.num_answer_tokens <= self.context_window

    @property
    def room(self) -> int:
        """Tokens that the window leaves for an answer."""
        return self.context_window - self.num_prompt_tokens

    def is_in_time(self, left_s: float | None) -> bool:
        return self.expected_s < math.inf and (left_s is None or self.expected_s <= left_s)


class Unfit(NamedTuple):
    """A tier that cannot do what is asked, and so is no candidate: named where it would have been the choice.

    `place` is that of the first candidate that is dearer. `param` is the field that it cannot take, if it is "unable".
    """

    tier: str
    level: str
    place: int
    kind: Lack
    param: str | None = None

    @property
    def lack(self) -> str:
        return f"cannot take {self.param}" if self.kind == "unable" else _LACKS[self.kind]


class Decision(NamedTuple):
    """Places among the candidates, in the order to try them; none when all are out.

    `lifted_from` is the place of the tier that would be the first, were it not doubtful.
    """

    order: tuple[int, ...]
    kind: Kind
    reason: str
    lifted_from: int | None = None


def levels(names: Iterable[str]) -> list[str]:
    """What each of the tiers, from cheap to dear, is good for: its name says it, else as much as the one before it."""
    level, found = TIERS[0], []
    for name in names:
        level = name if name in TIERS else level
        found.append(level)
    return found


def decide(
    candidates: Sequence[Candidate],
    complexity: Complexity | None,
    *,
    threshold: float,
    left_s: float | None = None,
    mode: Literal["auto", "pinned", "unclassified"] = "auto",
    is_limited: bool = False,
    is_asked: bool = True,
    unfit: Sequence[Unfit] = (),
) -> Decision:
    """The order in which to try `candidates`, of which there is at least one, from cheap to dear.

    `left_s` is the time to the caller's deadline. `is_limited` says that the key's quotas left dearer tiers out.
    In mode "auto" a request that the classifier did not judge goes up, to the most capable tier; `is_asked` says
    whether there was anything for it to judge. In the other modes it was not to: the caller pins, or there is no
    classifier.
    """
    places = range(len(candidates))
    up = [place for place in places if not candidates[place].is_out]
    if not up:
        return Decision((), "out", "every tier that could answer is out")
    roomy = [place for place in up if candidates[place].holds]
    if not roomy:
        most = max(candidates[place].room for place in up)
        roomy = [place for place in up if candidates[place].room == most]
    timely = [place for place in roomy if candidates[place].is_in_time(left_s)]
    shares = [
        TIERS.index(each.level) / len(TIERS) if complexity is None else complexity.suffices(each.level)
        for each in candidates
    ]
    likely = [] if complexity is None else [place for place in places if shares[place] >= threshold]

    def choose(places: Sequence[int]) -> int:
        if not places:
            return min(roomy, key=lambda place: candidates[place].expected_s)  # of equals the cheapest
        if mode != "auto":
            return places[0]
        good = [place for place in places if place in likely]
        return good[0] if good else max(places, key=shares.__getitem__)

    sure = [place for place in timely if not candidates[place].is_doubtful]
    good = [place for place in sure or timely if place in likely]
    chosen = choose(timely if mode == "pinned" else sure or timely)
    undoubted = choose(timely)
    if mode == "pinned":
        return Decision((chosen,), "pinned", "the request names it")

    def explain() -> tuple[Kind, str]:
        if len(candidates) == 1:
            if is_limited:
                return "quota", "the key's quotas leave no other"
            if unfit:
                return unfit[0].kind, "no other can: " + ", ".join(f"{each.tier} {each.lack}" for each in unfit)
            return "only", "no other may answer this"
        if not timely:
            return "deadline", "no tier is expected to be in time; this one soonest"
        if not candidates[chosen].holds:
            return "window", "no tier has room for the prompt and its longest answer; this one has the most"
        share = f"{shares[chosen]:.2f}"
        able = [each for each in unfit if complexity is None or complexity.suffices(each.level) >= threshold]
        cheaper = [each for each in able if each.place <= chosen]
        # Which tier would have been the choice if it could be.
        wanted = 0 if mode == "unclassified" else likely[0] if likely else chosen
        kind = _obstacle(candidates[wanted], left_s)
        instead = f"{candidates[wanted].tier} is cheaper, but {_LACKS[kind]}"
        if cheaper and wanted == chosen:
            kind, instead = cheaper[0].kind, f"{cheaper[0].tier} is cheaper, but {cheaper[0].lack}"
        if mode == "unclassified":
            text = "there is no classifier here"
            is_cheapest = chosen == 0 and not cheaper
            return ("unclassified", f"{text}; the cheapest tier") if is_cheapest else (kind, f"{text}; {instead}")
        if complexity is None:
            why = (
                "the classifier did not judge it in time" if is_asked else "there is nothing that the classifier reads"
            )
            return "unjudged", f"{why}; so the most capable tier"
        if chosen in good and chosen == wanted and not cheaper:
            return "suffices", f"the cheapest tier that is likely to suffice ({share})"
        if chosen in good:
            return kind, f"likely to suffice ({share}); {instead}"
        if not likely and chosen != undoubted:
            nearer = f"{candidates[undoubted].tier} would be nearer, but {_LACKS['doubtful']}"
            return "doubtful", f"may not suffice ({share}); {nearer}"
        if likely:
            return kind, f"may not suffice ({share}); {candidates[wanted].tier} would, but {_LACKS[kind]}"
        if is_limited:
            return "quota", f"may not suffice ({share}); the key's quotas leave no dearer tier"
        if able:
            return able[0].kind, f"may not suffice ({share}); {able[0].tier} would, but {able[0].lack}"
        return "best", f"may not suffice ({share}); no tier that may answer is more capable"

    lifted_from = undoubted if undoubted != chosen else None
    return Decision(_with_fallbacks(candidates, chosen, roomy), *explain(), lifted_from)


_LACKS: dict[Kind, str] = {
    "out": "out",
    "window": "has no room for prompt and answer",
    "tools": "has no tool parser",
    "deadline": "not expected to be in time",
    "doubtful": "its answers have been poor lately",
}


def _obstacle(candidate: Candidate, left_s: float | None) -> Kind:
    """Why a tier is not taken that would suffice."""
    if candidate.is_out:
        return "out"
    if candidate.holds and candidate.is_in_time(left_s) and candidate.is_doubtful:
        return "doubtful"
    return "deadline" if candidate.holds and not candidate.is_in_time(left_s) else "window"


def _with_fallbacks(candidates: Sequence[Candidate], chosen: int, roomy: Sequence[int]) -> tuple[int, ...]:
    """`chosen`, then upward, then downward; of tiers that share an engine one, for they share its fault."""
    dearer = [place for place in roomy if place > chosen]
    cheaper = [place for place in reversed(roomy) if place < chosen]
    by_backend: dict[str, int] = {}
    for place in (chosen, *dearer, *cheaper):
        by_backend.setdefault(candidates[place].backend, place)
    return tuple(by_backend.values())
