"""Every server test is bounded; what some of them share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from serving import TARGET, Stack, running
from speech import KEYS, build_speech, make_key
from tokenizers import Tokenizer

# Behind stand-ins every engine of a GPU target is the real model: more of them start, and share the cores.
TIMEOUT_S = 120 if TARGET is None else 240
HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(TIMEOUT_S))


@pytest.fixture(scope="session")
def cpu_tokenizer(artifact: Callable[[str], Path]) -> Tokenizer:
    """The real model's tokenizer."""
    folder = artifact("cpu") / "model_repository" / "llm_small" / "1" / "tokenizer"
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


@pytest.fixture(scope="session")
def speech_keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("keys") / "keys.json"


@pytest.fixture(scope="session")
def speech_stack(speech_keys: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """The scripted server with the speech models, and with keys."""
    KEYS["all"] = make_key(speech_keys, "all")
    folder = tmp_path_factory.mktemp("speech")
    with running(build_speech(HERE.parents[1] / "artifacts"), folder, f"--keys={speech_keys}") as stack:
        yield stack
