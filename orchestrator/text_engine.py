"""Engines of text: what they cannot do, said by name, and the prompt as they take it.

TensorRT-LLM's LLM-API model takes a prompt as text, applies no chat template, and gives no token ids: control tokens in
a prompt's text are control tokens to it, and how many tokens an answer had is our estimate unless it was cut.
"""

from __future__ import annotations

from collections.abc import Sequence

from orchestrator.config import Tier
from orchestrator.errors import InvalidRequestError
from orchestrator.request import ChatRequest, Request
from orchestrator.streaming.tokenizer import ChatTokenizer

LLMAPI = "llmapi"
# Fields that its contract has no tensor for, and the value of each that asks for nothing.
_NOT_TEXT = {"min_tokens": 0, "ignore_eos": False, "repetition_penalty": 1.0}


def check_text_request(request: Request, tier: Tier) -> None:
    """Raises `InvalidRequestError` for what an engine of text cannot do."""
    where = f"the model {tier.model!r} runs by TensorRT-LLM's LLM API"
    for field, neutral in _NOT_TEXT.items():
        if getattr(request, field) not in (None, neutral):
            raise InvalidRequestError(f"{field}: not supported, since {where}; remove it", param=field)
    if request.wants_log_probs:
        raise InvalidRequestError(f"logprobs: not supported, since {where}; remove it", param="logprobs")
    if not isinstance(request, ChatRequest) and not isinstance(request.prompt, str):
        raise InvalidRequestError(f"prompt: token ids are not supported, since {where}; send text", param="prompt")


def write_prompt(
    request: Request, messages: Sequence[dict[str, object]], tokenizer: ChatTokenizer, token_ids: list[int]
) -> str:
    """The prompt's text, whose tokens are `token_ids`; of a completion it is the caller's own.

    Raises `InvalidRequestError` when messages hold the text of a control token.
    """
    if isinstance(request, ChatRequest):
        return tokenizer.write_chat(messages, token_ids)
    assert isinstance(request.prompt, str)
    return request.prompt
