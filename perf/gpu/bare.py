"""A worker: AsyncLLM alone, in one process, as engine `vllm` loads it. `python -m perf.gpu.bare MODEL_FOLDER`

{"prompts": [[token id, ...], ...], "max_tokens": n, "end_id": id or null, "temperature": t, "seeds": [...] or null}
→ what `perf.gpu.answers.describe` makes of it, and "token_ids": [[...], ...]

It runs with the Python that has vLLM. The engine's parameters come as JSON in the first line.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from orchestrator.engines import EngineRequest
from orchestrator.engines.vllm import Settings, load_engine, make_params, warm_up
from perf.gpu.answers import describe
from perf.sse import Answer


async def generate(engine: Any, request: dict[str, Any]) -> dict[str, Any]:
    """Run all prompts together."""
    prompts, seeds = request["prompts"], request.get("seeds")
    temperature = request.get("temperature", 0.0)
    started_s = time.monotonic()

    async def one(index: int, prompt: list[int]) -> tuple[Answer, list[int]]:
        wanted = EngineRequest(
            f"{started_s}-{index}",
            prompt,
            request["max_tokens"],
            end_id=request.get("end_id"),
            sample=temperature > 0,
            temperature=temperature or 1.0,
            seed=None if seeds is None else seeds[index],
        )
        sent_s, times, token_ids = time.monotonic(), [], []
        params = make_params(wanted)
        async for output in engine.generate({"prompt_token_ids": prompt}, params, wanted.request_id):
            if new := output.outputs[0].token_ids:
                times.append(time.monotonic())
                token_ids += new
        return Answer(sent_s, times, len(token_ids), {}), token_ids

    done = await asyncio.gather(*(one(index, prompt) for index, prompt in enumerate(prompts)))
    return {**describe([answer for answer, _ in done], started_s), "token_ids": [ids for _, ids in done]}


def main() -> None:
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what vLLM prints must not get between our lines
    settings = Settings.model_validate(json.loads(sys.stdin.readline())["parameters"])
    import uvloop

    loop = uvloop.new_event_loop()
    asyncio.set_event_loop(loop)

    async def load() -> Any:
        engine = load_engine(settings, Path(sys.argv[1]) / "1")
        await warm_up(engine, settings)
        return engine

    engine = loop.run_until_complete(load())
    print(json.dumps({"ready": True}), file=out, flush=True)
    try:
        for line in sys.stdin:
            print(json.dumps(loop.run_until_complete(generate(engine, json.loads(line)))), file=out, flush=True)
    finally:
        engine.shutdown()


if __name__ == "__main__":
    main()
