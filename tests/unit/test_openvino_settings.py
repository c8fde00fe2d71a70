"""The engine parameters of a target's row, as the OpenVINO engine checks them."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from orchestrator.engines.openvino import Settings

GOOD: dict[str, Any] = {
    "engine": "openvino",
    "max_batch_size": "64",
    "max_tokens_in_paged_kv_cache": "65536",
    "max_num_tokens": "512",
    "enable_kv_cache_reuse": "true",
    "enable_chunked_context": "true",
    "context_window": "8192",
    "vocab_size": "49152",
}


def test_config_pbtxt_holds_text() -> None:
    settings = Settings.model_validate(GOOD)
    assert (settings.max_batch_size, settings.enable_kv_cache_reuse, settings.speculation) == (64, True, "none")


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({"max_num_tokens": "0"}, "max_num_tokens"),
        ({"speculation": "eagle"}, "speculation"),
        ({"max_num_token": "512"}, "Extra inputs are not permitted"),
        ({"speculation": "prompt_lookup"}, "'prompt_lookup' with kv_cache_precision 'u8' changes the text"),
    ],
)
def test_a_wrong_parameter_is_named(changed: dict[str, str], text: str) -> None:
    with pytest.raises(ValidationError, match=text):
        Settings.model_validate({**GOOD, **changed})


def test_prompt_lookup_with_exact_kv() -> None:
    Settings.model_validate({**GOOD, "speculation": "prompt_lookup", "kv_cache_precision": "f32"})
