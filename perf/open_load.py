"""A worker: requests at given times over HTTP, whether earlier ones are answered or not. `python -m perf.open_load URL`

{"asks": [[at_s, prompt, max_tokens], ...], "may_end": true if answers may be shorter}
→ {"answers": [{"sent_s", "times_s", "tokens", "rt"} or {"failed"}, ...]}

Times are in seconds from the first moment, `times_s` of the events with text. Each request has a connection of its own,
opened when its time has come. One thread; what was received is parsed when all is over.
"""

from __future__ import annotations

import selectors
import sys
import time
from collections.abc import Sequence
from typing import Any

from perf.errors import PerfError
from perf.sse import SseConnection, chat_body
from perf.worker import answer_requests


def load(url: str, asks: Sequence[tuple[float, str, int]], may_end: bool = False) -> list[dict[str, Any]]:
    """Ask each at its time, seconds from now and rising; the answers in the order of `asks`."""
    bodies = [chat_body(prompt, max_tokens, may_end=may_end) for _, prompt, max_tokens in asks]
    opened: list[SseConnection] = []
    failures: dict[int, str] = {}
    started_s = time.monotonic()
    with selectors.DefaultSelector() as selector:
        try:
            while len(opened) < len(asks) or selector.get_map():
                if len(opened) < len(asks) and asks[len(opened)][0] <= time.monotonic() - started_s:
                    connection = SseConnection(url)
                    connection.send(bodies[len(opened)])
                    selector.register(connection, selectors.EVENT_READ, len(opened))
                    opened.append(connection)
                    continue
                wait_s = asks[len(opened)][0] - (time.monotonic() - started_s) if len(opened) < len(asks) else None
                for key, _ in selector.select(None if wait_s is None else max(0.0, wait_s)):
                    try:
                        is_whole = opened[key.data].receive()
                    except PerfError as error:
                        failures[key.data] = str(error)
                        is_whole = True
                    if is_whole:
                        selector.unregister(key.fileobj)
        finally:
            for connection in opened:
                connection.close()
    return [_describe(connection, started_s, failures.get(place)) for place, connection in enumerate(opened)]


def _describe(connection: SseConnection, started_s: float, failure: str | None) -> dict[str, Any]:
    try:
        if failure is not None:
            raise PerfError(failure)
        answer = connection.answer()
    except PerfError as error:
        return {"failed": str(error)}
    return {
        "sent_s": answer.sent_s - started_s,
        "times_s": [time_s - started_s for time_s in answer.times_s],
        "tokens": answer.num_tokens,
        "rt": answer.rt,
    }


def main() -> None:
    answer_requests(lambda request: {"answers": load(sys.argv[1], request["asks"], request.get("may_end", False))})


if __name__ == "__main__":
    main()
