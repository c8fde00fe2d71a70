"""What unit tests share: the real tokenizer, engines in process, and hypothesis that writes nowhere."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import fake_pb_utils
import pytest
from hypothesis import settings
from hypothesis.configuration import set_hypothesis_home_dir
from redis_server import RedisServer
from tokenizers import Tokenizer

TOKENIZER = Path("model_repository", "llm_small", "1", "tokenizer")

set_hypothesis_home_dir(Path(tempfile.gettempdir(), "triton-realtime-hypothesis"))
settings.register_profile("ours", database=None, deadline=None, derandomize=True)
settings.load_profile("ours")

# Outside of Triton there is no such module; ours is enough for what unit tests look at.
sys.modules.setdefault("triton_python_backend_utils", fake_pb_utils)


@pytest.fixture(scope="session")
def tokenizer_dir(artifact: Callable[[str], Path]) -> Path:
    return artifact("scripted") / TOKENIZER


@pytest.fixture(scope="session")
def tokenizer(tokenizer_dir: Path) -> Tokenizer:
    return Tokenizer.from_file(str(tokenizer_dir / "tokenizer.json"))


@pytest.fixture(scope="session")
def redis_url() -> Iterator[str]:
    server = RedisServer()
    server.start()
    yield server.url
    server.stop()
