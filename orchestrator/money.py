"""What requests cost, by tenant and tier."""

from __future__ import annotations

from collections import Counter

from orchestrator.answer import Answer
from orchestrator.limits.ledger import Amount

# Of more tenants than these the later ones are counted together: each is several lines on the metrics page.
MAX_TENANTS = 100
OTHERS = "others"


class Spending:
    """All by (tenant, tier); `tokens` by (tenant, tier, "input" or "output"), money in billionths of a dollar."""

    def __init__(self) -> None:
        self.requests: Counter[tuple[str, str]] = Counter()
        self.tokens: Counter[tuple[str, str, str]] = Counter()
        self.nano_usd: Counter[tuple[str, str]] = Counter()
        self._tenants: set[str] = set()

    def count(self, tenant: str, answer: Answer, used: Amount) -> None:
        """A request that `answer` was for. `used` is its tenant's share: nothing of what another one pays for."""
        if used == Amount():
            return
        if tenant not in self._tenants:
            tenant = tenant if len(self._tenants) < MAX_TENANTS else OTHERS
            self._tenants.add(tenant)
        tier = answer.tier.name
        self.requests[tenant, tier] += used.requests
        if used.tokens:
            self.tokens[tenant, tier, "input"] += answer.usage.prompt_tokens
            self.tokens[tenant, tier, "output"] += used.tokens - answer.usage.prompt_tokens
            self.nano_usd[tenant, tier] += used.nano_usd
