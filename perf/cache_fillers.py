"""Answers that a cache's store has before its server starts: to have 100,000 made by requests would take an hour.

Their questions are all in one partition, that of a question alone to the cheapest tier, and go into the store by its
own `put`: into Redis from here, into a store of the orchestrator's process by the Triton model `filled_orchestrator`,
which takes the orchestrator's place in a source repository.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from orchestrator.cache.key import Identity, Origin, identify
from orchestrator.cache.store import Entry, Store
from orchestrator.cache.stored import StoredAnswer
from orchestrator.config import load_tiers
from orchestrator.contracts import ORCHESTRATOR_MODEL
from orchestrator.pipeline import digest_tier
from orchestrator.request import ChatRequest
from orchestrator.streaming.text import Piece
from perf.cache_lookup_speed import Question

# Names the file that `filled_orchestrator` reads; without it its store begins empty.
FILE_VARIABLE = "PERF_CACHE_FILLERS"
_TENANT = "default"  # without keys
_TTL_S = 3600.0
_TEXT = "It depends on what there is; begin with the simplest thing that could work, and measure it. " * 7


def write_fillers(file: Path, artifact: Path, questions: Sequence[Question]) -> None:
    """`questions` with an answer each, as requests to `artifact` would have them stored."""
    tier = load_tiers(artifact / "tiers.toml").tier[0]
    request = ChatRequest.model_validate({"model": tier.name, "messages": [{"role": "user", "content": "Why?"}]})
    identity = identify(request, Origin(_TENANT, tier.name, template=digest_tier(tier, artifact)))
    answer = StoredAnswer(tier.name, tier.model, [Piece(_TEXT)], num_prompt_tokens=40, num_completion_tokens=120)
    head = {
        "identity": identity._asdict(),
        "answer": answer.to_json().decode(),
        "model": tier.model,
        "texts": [question.text for question in questions],
    }
    vectors = np.stack([question.vector for question in questions])
    with file.open("wb") as stream:
        np.savez(stream, head=np.frombuffer(json.dumps(head).encode(), np.uint8), vectors=vectors)


def read_fillers(file: Path, now_s: float) -> Iterator[Entry]:
    """What `write_fillers` wrote; `now_s` is the time of the store's clock."""
    with np.load(file, allow_pickle=False) as arrays:
        head, vectors = json.loads(arrays["head"].tobytes()), arrays["vectors"]
    identity, answer = Identity(**head["identity"]), head["answer"].encode()
    for number, (text, vector) in enumerate(zip(head["texts"], vectors)):
        # Nobody asks for it by its exact key, which need only be its own.
        own = identity._replace(exact_key=f"filler-{number}", question=text)
        yield Entry(own, answer, head["model"], vector, now_s, now_s + _TTL_S)


async def fill(store: Store, file: Path) -> None:
    """Store what the file has."""
    for entry in read_fillers(file, store.clock()):
        await store.put(entry)


def fillable_sources(sources: Path, folder: Path) -> Path:
    """Copy the source repository at `sources`, with `filled_orchestrator` in the orchestrator's place; its path."""
    shutil.copytree(sources, folder, ignore=shutil.ignore_patterns("__pycache__"))
    model = Path(__file__).with_name("filled_orchestrator.py")
    shutil.copyfile(model, folder / ORCHESTRATOR_MODEL / "1" / "model.py")
    return folder
