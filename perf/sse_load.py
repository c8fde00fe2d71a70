"""A worker: many streams at once over HTTP, from one thread. `python -m perf.sse_load URL`

{"prompts": ["...", ...], "max_tokens": n} → {"tokens": n, "events": n, "seconds": s}
"""

from __future__ import annotations

import sys
from typing import Any

from perf.sse import ask_together, chat_body
from perf.worker import answer_requests


def load(url: str, prompts: list[str], max_tokens: int) -> dict[str, Any]:
    """Ask all prompts together, each over a connection of its own, opened before.

    `seconds` runs from before the first request is sent until the last token has arrived.
    """
    started_s, answers = ask_together(url, [chat_body(prompt, max_tokens) for prompt in prompts])
    return {
        "tokens": sum(answer.num_tokens for answer in answers),
        "events": sum(answer.num_events for answer in answers),
        "seconds": max(answer.last_token_s for answer in answers) - started_s,
    }


def main() -> None:
    answer_requests(lambda request: load(sys.argv[1], request["prompts"], request["max_tokens"]))


if __name__ == "__main__":
    main()
