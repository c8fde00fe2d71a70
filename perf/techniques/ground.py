"""What the techniques share: target cpu's engine alone, its server, and texts that no cache has seen."""

from __future__ import annotations

import itertools
import json
import random
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import cached_property
from pathlib import Path
from typing import Any

from build.compiler import build
from build.fetch import cache_folder
from build.router_data import PATH, read_labelled
from build.rows import TargetRow, load_models, load_target
from orchestrator.config import Compression
from orchestrator.streaming.tokenizer import ChatTokenizer
from perf.prompts import fresh_question
from perf.report import say
from perf.sse import SseConnection, chat_body
from perf.stack import Stack, find_artifact, running_stack
from perf.worker import Worker

# Of the server under test: prompts of this tier are compressed, those of the next are not. Both have one engine.
COMPRESSED_TIER, WHOLE_TIER = "medium", "complex"
MIN_COMPRESSED_TOKENS = 512
NUM_FIRST_REQUESTS = 10


class Ground:
    """A context manager; what a technique needs is started when the first one asks for it, and stays."""

    def __init__(self, artifacts: Path, num_rounds: int) -> None:
        self.num_rounds = num_rounds
        self.first_ttft_ms: list[float] = []  # of the first requests that the server got, in order
        self._artifacts = artifacts
        self._numbers = itertools.count()
        self._opened = ExitStack()

    def __enter__(self) -> Ground:
        return self

    def __exit__(self, *exc: object) -> None:
        self._opened.close()

    # --- texts ---

    def number(self) -> int:
        return next(self._numbers)

    def question(self) -> str:
        """A question that was not asked before."""
        number = self.number()
        return fresh_question(number, number)

    @cached_property
    def questions(self) -> list[str]:
        """What people asked, in English."""
        texts = [row.turns[0].text for row in read_labelled(PATH) if row.lang == "en" and len(row.messages) == 1]
        return [text for text in texts if 40 <= len(text) <= 400]

    def long_text(self, num_tokens: int, seed: int = 0) -> str:
        """Questions of people, drawn by `seed`: `num_tokens`, or a little more.

        A number in front is used once; for one seed the rest is the same.
        """
        texts = [f"{self.number():06d}."]
        for text in random.Random(seed).sample(self.questions, len(self.questions)):
            if num_tokens <= 0:
                break
            texts.append(text)
            num_tokens -= len(self.tokenizer.encode(text))
        return "\n".join(texts)

    def prompt(self, text: str) -> list[int]:
        """Token ids of `text` as the only user message."""
        return self.tokenizer.encode_chat([{"role": "user", "content": text}])

    # --- the engine ---

    @cached_property
    def artifact(self) -> Path:
        """Target cpu, as `python -m build` made it."""
        return find_artifact(self._artifacts, "cpu")

    @cached_property
    def tokenizer(self) -> ChatTokenizer:
        return ChatTokenizer.load(next((self.artifact / "model_repository").glob("llm_*/1/tokenizer")))

    @contextmanager
    def engine(self, **changes: Any) -> Iterator[Worker]:
        """Target cpu's engine in a process of its own, with some of its settings changed (`engine_worker`)."""
        folder = str(next((self.artifact / "model_repository").glob("llm_*")))
        with Worker("perf.techniques.engine_worker", folder, json.dumps(changes)) as worker:
            worker.ask({"groups": []})  # answered when it is loaded
            yield worker

    # --- servers ---

    @cached_property
    def stack(self) -> Stack:
        """Target cpu, with the prompts of one tier compressed; it has answered its first requests."""
        target = load_target("cpu")
        rules = Compression(keep=0.5, min_tokens=MIN_COMPRESSED_TOKENS, timeout_s=10.0)
        tiers = [
            tier.model_copy(update={"compression": rules}) if tier.name == COMPRESSED_TIER else tier
            for tier in target.tiers
        ]
        stack = self._serve(target.model_copy(update={"tiers": tiers}), "cpu, one tier with compression")
        with SseConnection(stack.gateway_url) as connection:
            for _ in range(NUM_FIRST_REQUESTS):
                self.first_ttft_ms.append(connection.ask(chat_body(self.question(), 2)).ttft_ms)
        return stack

    @cached_property
    def scripted(self) -> Stack:
        """Target scripted as it is: an engine that answers at once, and the real embedder."""
        return self._serve(load_target("scripted"), "scripted")

    @cached_property
    def unbatched(self) -> Stack:
        """Target scripted, whose embedder computes each text alone."""
        target = load_target("scripted")
        alone = {"max_queue_delay_microseconds": None, "allow_ragged_batch": False}
        models = {
            name: model.model_copy(update=alone) if name.startswith("embedding_") else model
            for name, model in target.models.items()
        }
        return self._serve(target.model_copy(update={"models": models}), "scripted, its embedder without batches")

    def _serve(self, target: TargetRow, name: str) -> Stack:
        say(f"building target {name}")
        folder = Path(self._opened.enter_context(tempfile.TemporaryDirectory(prefix="perf-techniques-")))
        artifact = folder / "artifact"
        build(target, load_models(target), artifact, cache=cache_folder(), progress=lambda _: nullcontext())
        return self._opened.enter_context(running_stack(artifact))
