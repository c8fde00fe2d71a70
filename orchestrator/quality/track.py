"""One tier's record, over all questions or over one cluster of them: what is usual, what is of late, is it doubtful?

Two good models often answer a question so differently that their vectors' cosine is below any fixed line: what share of
a tier's answers is like the expert's says little by itself, and differs from cluster to cluster. So a record first
learns what is usual, and the tier is doubtful when its latest answers are surely worse than that by more than a given
share. Whoever is poor from the first answer on has no better usual; for him there is an absolute line.

"Surely" is Wilson's interval of the latest 60 answers (which finds a collapse soon) or 240 (a slide), of at least 50.
It is looked at after every answer, and of hundreds of looks at a 95 % interval some find something in anything. With
`Z_DOUBT`, simulated, even a record that is exactly at the line gives an alarm in one of a hundred runs of 500 answers
(10,000 requests at 5 %), and one that is as usual in none of thousands: `python -m perf quality`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from orchestrator.config import QualityPolicy
from orchestrator.quality.wilson import wilson_interval

MIN_ANSWERS = 50
WINDOWS = (60, 240)
Z_DOUBT = 3.7
# To believe in a recovery 95 % are enough: the next collapse would be found again.
Z_RECOVERY = 1.96
# How many answers say what is usual.
NUM_USUAL_OF_TIER = 100
NUM_USUAL_OF_CLUSTER = 50
# The published rule is about the last hundred.
NUM_RETRAINING = 100


@dataclass
class Track:
    """`latest` are verdicts, True for good, the last one last; of them the last `num_fresh` are of the present state.

    `usual_good` of the first `num_usual` answers were good. `answered_s` is when the last answer came, seconds since
    1970.
    """

    max_usual: int
    num_usual: int = 0
    usual_good: int = 0
    latest: deque[bool] = field(default_factory=lambda: deque(maxlen=max(WINDOWS)))
    num_fresh: int = 0
    is_doubtful: bool = False
    num_until_call: int = 0
    answered_s: float = 0.0

    def add(self, is_good: bool, policy: QualityPolicy) -> bool:
        """Take in a verdict; returns whether the record became doubtful or recovered by it."""
        self.latest.append(is_good)
        self.num_fresh = min(self.num_fresh + 1, max(WINDOWS))
        self.num_until_call = max(0, self.num_until_call - 1)
        if self.is_doubtful:
            return self._recovers(policy)
        if self.num_usual < self.max_usual:
            self.num_usual += 1
            self.usual_good += is_good
        if all(self._upper(num) >= self.bar(policy) for num in self._windows()):
            return False
        self.is_doubtful = True
        self.num_fresh = 0
        if self.num_usual < self.max_usual:  # it had begun already: this is not what shall be usual
            self.num_usual = self.usual_good = 0
        return True

    @property
    def usual(self) -> float | None:
        """The usual share of good answers; None while it is being learnt."""
        return self.usual_good / self.num_usual if self.num_usual == self.max_usual else None

    def bar(self, policy: QualityPolicy) -> float:
        """The share of good answers below which it is doubtful."""
        return max(policy.min_quality, (1 - policy.max_drop) * (self.usual or 0.0))

    def share(self, num: int) -> tuple[int, int]:
        """Of the latest `num` answers, how many were good, and how many there are."""
        last = self._last(num)
        return sum(last), len(last)

    def calls_for_retraining(self, policy: QualityPolicy) -> bool:
        """Whether the last hundred answers do, surely; then not again before a hundred more."""
        good, num = self.share(NUM_RETRAINING)
        if num < NUM_RETRAINING or self.num_until_call:
            return False
        # What is usual is an estimate as well: it may be a standard error lower.
        usual, surely_usual = self.usual, wilson_interval(self.usual_good, self.num_usual, 1.0)[0]
        if usual is None:  # poor from the first answer on, if it is doubtful
            usual = surely_usual = float(self.is_doubtful)
        if usual - good / num <= policy.retrain_above or self._upper(num) >= surely_usual:
            return False
        self.num_until_call = NUM_RETRAINING
        return True

    def _recovers(self, policy: QualityPolicy) -> bool:
        for num in self._windows():
            good, num = self.share(num)
            if wilson_interval(good, num, Z_RECOVERY)[0] >= self.bar(policy):
                self.is_doubtful = False
                self.num_fresh = num
                return True
        return False

    def _windows(self) -> Iterable[int]:
        """How many of the latest answers to look at, each long enough and all of the present state."""
        return {min(size, self.num_fresh) for size in WINDOWS if min(size, self.num_fresh) >= MIN_ANSWERS}

    def _upper(self, num: int) -> float:
        good, num = self.share(num)
        return wilson_interval(good, num, Z_DOUBT)[1]

    def _last(self, num: int) -> list[bool]:
        return list(self.latest)[-num:] if num else []
