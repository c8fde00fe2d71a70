"""What unit tests share: the real tokenizer, engines in process, and hypothesis that writes nowhere."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import fake_pb_utils
import pytest
from cache_stores import LOOP, MakeStore, RedisStores, make_memory_store, run
from hypothesis import settings
from hypothesis.configuration import set_hypothesis_home_dir
from tokenizers import Tokenizer

from perf.redis_server import RedisServer

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


@pytest.fixture(scope="session")
def redis_stores(redis_url: str) -> Iterator[RedisStores]:
    stores = RedisStores(redis_url)
    yield stores
    run(stores.client.aclose())
    LOOP.close()


@pytest.fixture(params=["memory", "redis"])
def make_store(request: pytest.FixtureRequest) -> MakeStore:
    """Makes an empty store, of each kind in turn."""
    stores: MakeStore = request.getfixturevalue("redis_stores") if request.param == "redis" else make_memory_store
    return stores
