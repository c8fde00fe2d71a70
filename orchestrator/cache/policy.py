"""Which requests the cache serves, and which answers it keeps.

A request is not cached (it "bypasses" the cache) when

* it is a `/v1/completions`: its prompt has no turns, so nothing tells a question from what stands before it;
* it asks for several choices, or for a temperature above the policy's: it wants variety. A request that states no
  temperature gets the tier's own, which the policy is set to go with;
* it has `ignore_eos`: its answer has no end of its own. Load tools send it, to measure a generation.

Only its own exact repetition is served to a request that has a `seed` (it wants that very answer again), `logprobs`
(they are of the tokens of that very prompt) or tools, or whose question the guards do not read: it is too long, or in
no language of theirs.
"""

from __future__ import annotations

from collections.abc import Sequence

from orchestrator.cache.guards import MAX_CHARACTERS
from orchestrator.cache.languages import guess_language
from orchestrator.config import CachePolicy
from orchestrator.request import ChatRequest, Request
from orchestrator.streaming.chunks import Choice


def is_cacheable(request: Request, policy: CachePolicy) -> bool:
    return (
        isinstance(request, ChatRequest)
        and request.num_choices == 1
        and not request.ignore_eos
        and (request.temperature is None or request.temperature <= policy.max_temperature)
    )


def may_be_near(request: ChatRequest, question: str | None, policy: CachePolicy) -> bool:
    """Whether another question's answer may be served to a cacheable request, and its own answer to others."""
    return (
        policy.semantic
        and question is not None
        and len(question) <= MAX_CHARACTERS
        and guess_language(question).language is not None
        and request.seed is None
        and not request.wants_log_probs
        and not request.offered_tools
    )


def may_be_kept(choices: Sequence[Choice]) -> bool:
    """Only what the model itself brought to its end, as text: nothing cut at a limit, no tool calls, nothing empty."""
    return bool(choices) and all(
        choice.finish_reason == "stop" and choice.text and not choice.calls for choice in choices
    )
