"""A worker: many streamed completions at once. `python -m perf.gpu.load URL MODEL`

By HTTP SSE from one thread, or, where URL is grpc://HOST:PORT, by our gRPC front.

{"prompts": [[token id, ...], ...], "max_tokens": n, "temperature": t, "seeds": [...] or null, "texts": true if wanted,
 "ignore_eos": true unless said otherwise} → what `perf.gpu.answers.describe` makes of it, and "texts": [...]
"""

from __future__ import annotations

import json
import sys
from typing import Any

from perf.errors import PerfError
from perf.gpu import grpc_load
from perf.gpu.answers import describe
from perf.sse import COMPLETIONS_PATH, ask_together
from perf.worker import answer_requests


def make_bodies(request: dict[str, Any], model: str) -> list[bytes]:
    """A body for each prompt."""
    seeds = request.get("seeds")
    ignore_eos = request.get("ignore_eos", True)
    common = {
        "model": model,
        "stream": True,
        "stream_options": {"include_usage": True},
        "max_tokens": request["max_tokens"],
        "temperature": request.get("temperature", 0.0),
        "top_p": 1.0,
        **({"ignore_eos": True} if ignore_eos else {}),
    }
    return [
        json.dumps({**common, "prompt": prompt, **({} if seeds is None else {"seed": seeds[index]})}).encode()
        for index, prompt in enumerate(request["prompts"])
    ]


def load(url: str, model: str, request: dict[str, Any]) -> dict[str, Any]:
    """Ask all prompts together, over connections that were opened before.

    Raises `PerfError` for a stream that has not exactly its own number of tokens, unless it may end by itself.
    """
    bodies = make_bodies(request, model)
    address = url.removeprefix("grpc://")
    started_s, answers = (
        ask_together(url, bodies, COMPLETIONS_PATH) if address == url else grpc_load.ask_together(address, bodies)
    )
    for answer in answers:
        if request.get("ignore_eos", True) and answer.num_tokens != request["max_tokens"]:
            raise PerfError(f"{url}: a stream of {request['max_tokens']} tokens had {answer.num_tokens}")
    described = describe(answers, started_s)
    if request.get("texts"):
        described["texts"] = ["".join(answer.texts) for answer in answers]
    return described


def main() -> None:
    answer_requests(lambda request: load(sys.argv[1], sys.argv[2], request))


if __name__ == "__main__":
    main()
