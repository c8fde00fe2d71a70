"""What a python-backend `llm_*` model runs: token ids in, token ids out.

`Engine` is the seam the Triton model talks to. An engine that is a step function at heart (OpenVINO GenAI, the
scripted one) is a `Stepper`; `engines.worker` is the process that steps it, `engines.process` the `Engine` in front.
`create_stepper` chooses by the name that the target's row gives, and only then imports the heavy library. vLLM is no
stepper: `engines.vllm` runs in the worker's place.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, Protocol

# How the text of a refusal ends that only says "not now".
TRY_AGAIN = "try again later"


class EngineRefusal(Exception):
    """This request cannot be run; the text names the tensor, its value and what is allowed."""


@dataclass(frozen=True, slots=True)
class Lora:
    """A LoRA adapter: its number in the engine's cache, and the folder with its tensors."""

    task_id: int
    folder: str


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """One sequence to generate.

    `input_ids` are the prompt's token ids. At most `max_new_tokens` are generated. `end_id` of None never stops.
    Sampling is greedy unless `sample` is true; `top_k` of 0 means all tokens, `seed` of None a random one.

    `stop_words` and `bad_words` are sequences of token ids: the output ends with the first stop word in it, which it
    keeps, and holds no bad word. `log_probs` asks for one log probability a token. `guide_type` (one of
    `parsing.GUIDE_TYPES`) with `guide` is what the text must follow; both None is free text.
    """

    request_id: str
    input_ids: list[int]
    max_new_tokens: int
    end_id: int | None = None
    min_tokens: int = 0
    sample: bool = False
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    stop_words: list[list[int]] = field(default_factory=list)
    bad_words: list[list[int]] = field(default_factory=list)
    log_probs: bool = False
    guide_type: str | None = None
    guide: str | None = None
    prompt: str | None = None  # its text, for an engine of text
    lora: Lora | None = None


class Chunk(NamedTuple):
    """New tokens of one request. The last chunk has `finished` true and may be empty; `error` ends it as failed.

    `log_probs` holds the natural logarithm of each token's probability; None when the request did not ask. An engine of
    text has no token ids: it gives `text`, and says itself when the answer was cut `at_limit`.
    """

    token_ids: list[int]
    finished: bool = False
    error: str | None = None
    log_probs: list[float] | None = None
    text: str | None = None
    at_limit: bool = False


Deliver = Callable[[Chunk], None]


class Engine(Protocol):
    """Runs many requests at once. Every accepted request ends with exactly one finished chunk.

    An engine that failed ends every request with an error chunk, then refuses every call until it has started again.
    """

    def add(self, request: EngineRequest, deliver: Deliver) -> None:
        """Start a request; `deliver` is called from another thread, and must not block it.

        Raises `EngineRefusal` when the engine cannot run it.
        """

    def stop(self, request_id: str) -> None:
        """End a request now, with an empty finished chunk. An unknown or finished id is not an error.

        Raises `EngineRefusal` when the engine has failed.
        """

    def kv_cache_usage(self) -> float | None:
        """As `Stepper.kv_cache_usage`, after the last step."""

    def close(self) -> None:
        """End every request with an error and free the engine."""


class Stepper(Protocol):
    """An engine that advances when told to."""

    def add(self, request: EngineRequest) -> None:
        """Take in a request, to be run from the next step on. Raises `EngineRefusal`."""

    def stop(self, request_id: str) -> None:
        """Forget a request; no step that begins after this one computes for it."""

    def step(self) -> dict[str, Chunk]:
        """Run one decode step over all live requests; returns what is new, by request id."""

    def has_requests(self) -> bool:
        """Whether a step would do anything."""

    def kv_cache_usage(self) -> float | None:
        """The share of the KV blocks that live requests hold, 0 to 1; None without a KV cache.

        What only the prefix cache still knows is free.
        """


def create_stepper(parameters: Mapping[str, str], model_dir: Path) -> Stepper:
    """The stepper that `parameters["engine"]` names, loaded from `model_dir` (the model's version folder).

    Raises `ValueError` for an engine that does not exist or a parameter it does not know.
    """
    name = parameters.get("engine")
    if name == "openvino":
        from orchestrator.engines.openvino import OpenVINOStepper

        return OpenVINOStepper.load(model_dir, parameters)
    if name == "scripted":
        from orchestrator.engines.scripted import ScriptedStepper

        return ScriptedStepper.load(model_dir, parameters)
    raise ValueError(f"parameters.engine: {name!r} is not an engine; one of 'openvino', 'scripted', 'vllm'")
