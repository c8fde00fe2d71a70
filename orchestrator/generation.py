"""The generate stage: a request's choices out of an engine's tokens, each an event or a part of the whole answer."""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace
from typing import Any, Protocol

from orchestrator.answer import Answer, Output
from orchestrator.config import Tier, ToolFormat
from orchestrator.engines import TRY_AGAIN, Chunk, EngineRequest, Lora
from orchestrator.errors import (
    ContextWindowError,
    EngineError,
    InvalidRequestError,
    NoToolParserError,
    OverloadedError,
    shorten,
)
from orchestrator.request import ChatRequest, Guide, Message, Request, ToolChoice
from orchestrator.schemas import check_schema
from orchestrator.streaming.chunks import Choice
from orchestrator.streaming.text import TextStream
from orchestrator.streaming.tokenizer import ChatTokenizer
from orchestrator.streaming.tool_calls import ToolParser, create_tool_parser
from orchestrator.text_engine import LLMAPI, check_text_request, write_prompt

# Below it sampling is greedy in all but name, and logits divided by it overflow.
MIN_TEMPERATURE = 1e-3
# Up to this size a prompt is tokenised on the event loop (1 ms for 1,000 characters, measured on the README's machine);
# beyond it in a thread, so that no other call's tokens wait.
MAX_INLINE_BYTES = 4096


class EngineClient(Protocol):
    """The way to the engine models."""

    def stream(self, model: str, request: EngineRequest) -> AsyncGenerator[Chunk, None]:
        """New tokens as the engine makes them; raises `EngineError` when it fails, also after tokens.

        Closing it early ends the generation; it returns when the engine has let go of the request.
        """

    async def stop(self, model: str, request_id: str) -> None:
        """End a generation; an unknown or finished id is not an error."""


class Generation:
    """One answer's way out of the engine. `run` sends all of it to `output`."""

    def __init__(self, output: Output, answer: Answer, tokenizer: ChatTokenizer, engines: EngineClient) -> None:
        self._output = output
        self._answer = answer
        self._request = answer.request
        self._tier = answer.tier
        self._tokenizer = tokenizer
        self._engines = engines
        self._live: set[str] = set()  # engine request ids
        self._has_failed = False

    async def run(self) -> None:
        check_tools(self._request, self._tier)
        guide = forced_call_guide(self._request) or self._request.guide
        if guide is not None and not self._tier.has_guides:
            raise InvalidRequestError(
                f"{guide.param}: the model {self._tier.model!r} has no guided decoding; leave it out, or name another "
                "model",
                param=guide.param,
            )
        is_text = self._tier.runtime == LLMAPI
        if is_text:
            check_text_request(self._request, self._tier)
        input_ids = self._answer.input_ids
        if input_ids is None:
            input_ids = await tokenize(self._request, self._tokenizer, self._answer.num_request_bytes)
        first = build_engine_request(self._request, self._tier, input_ids, guide)
        if is_text:
            messages = self._request.messages if isinstance(self._request, ChatRequest) else []
            rows = [template_message(each) for each in messages]
            first = replace(first, prompt=write_prompt(self._request, rows, self._tokenizer, input_ids))
            self._answer.is_estimated = True
        self._answer.num_prompt_tokens = len(input_ids)
        self._output.begin(self._answer, first.request_id)
        self._output.on_cancel(self._stop_all)
        try:
            if len(self._answer.choices) == 1:
                await self._generate(self._answer.choices[0], first)
            else:
                await self._generate_all(first)
        except EngineError as error:
            text = error.message.removeprefix("guided_decoding_guide: ")
            if guide is not None and text != error.message:
                if text.endswith(TRY_AGAIN):
                    raise OverloadedError(f"{guide.param}: {text}", param=guide.param) from error
                raise InvalidRequestError(f"{guide.param}: {text}", param=guide.param) from error
            if not isinstance(self._request, ChatRequest) and error.message.startswith("input_ids: "):
                text = error.message.removeprefix("input_ids: ")
                raise InvalidRequestError(f"prompt: {text}", param="prompt") from error
            raise
        self._output.on_cancel(None)
        self._output.finish()

    async def _generate_all(self, first: EngineRequest) -> None:
        """All choices side by side: the engine batches them. One that fails ends them all."""
        tasks = [
            asyncio.create_task(self._generate(choice, for_choice(first, choice.index)))
            for choice in self._answer.choices
        ]
        try:
            await asyncio.gather(*tasks)
        except BaseException:
            self._has_failed = True
            await self._stop_all()
            await asyncio.gather(*tasks, return_exceptions=True)
            raise

    async def _stop_all(self) -> None:
        for request_id in list(self._live):
            await self._engines.stop(self._tier.model, request_id)

    async def _generate(self, choice: Choice, engine_request: EngineRequest) -> None:
        """One choice, to its finish reason."""
        text = TextStream(
            self._tokenizer.decode_stream(),
            self._request.stops,
            choose_parser(self._request, self._tier),
            log_probs=self._request.wants_log_probs,
        )
        ended_by_id, said, is_cut = False, "", False
        self._raise_if_over()
        self._live.add(engine_request.request_id)
        try:
            async with aclosing(self._engines.stream(self._tier.model, engine_request)) as stream:
                async for chunk in stream:
                    self._raise_if_over()
                    if chunk.text is not None:
                        if chunk.text and self._answer.first_token_s is None:
                            self._note_first_token()
                        said, is_cut = said + chunk.text, chunk.at_limit
                        choice.num_tokens += bool(chunk.text)
                        self._output.emit(choice, text.push_text(chunk.text))
                        if text.is_stopped:
                            break
                        continue
                    token_ids = chunk.token_ids
                    if token_ids and token_ids[-1] == engine_request.end_id:
                        token_ids, ended_by_id = token_ids[:-1], True
                    if token_ids and self._answer.first_token_s is None:
                        self._note_first_token()
                    choice.num_tokens += len(token_ids)
                    self._output.emit(choice, text.push(token_ids, chunk.log_probs))
                    if text.is_stopped:
                        break
        finally:
            self._live.discard(engine_request.request_id)
        self._raise_if_over()  # a stopped engine ends its stream as if the answer were whole
        self._output.emit(choice, text.flush())
        limit = engine_request.max_new_tokens
        if engine_request.prompt is not None:
            # An answer that was cut has exactly as many as it may have; of the rest only the text is known.
            choice.num_tokens = limit if is_cut else min(len(self._tokenizer.encode(said)), limit)
            ended_by_id = not is_cut
        at_limit = choice.num_tokens >= limit and not ended_by_id and not text.is_stopped
        if text.is_cut and not at_limit and not text.is_stopped:
            raise EngineError("the model's tool call ended before its arguments did; ask again")
        # A call that the caller's stop string cut is no call to be made.
        has_called = choice.calls and not text.is_cut
        self._output.end_choice(choice, "length" if at_limit else "tool_calls" if has_called else "stop")

    def _note_first_token(self) -> None:
        self._answer.first_token_s = time.monotonic()
        self._output.enter("decode")

    def _raise_if_over(self) -> None:
        self._output.raise_if_cancelled()
        if self._has_failed:
            raise EngineError("another choice of this request failed")


async def tokenize(request: Request, tokenizer: ChatTokenizer, num_bytes: int) -> list[int]:
    """The prompt as the engine gets it; `num_bytes` is the size of the caller's JSON.

    Raises `InvalidRequestError` for a token id that the tokenizer does not know.
    """
    if not isinstance(request, ChatRequest) and not isinstance(request.prompt, str):
        check_ids(request.prompt, tokenizer.vocab_size)
        return request.prompt

    def work() -> list[int]:
        if isinstance(request, ChatRequest):
            tools = [tool.model_dump(exclude_none=True) for tool in request.offered_tools]
            return tokenizer.encode_chat([template_message(each) for each in request.messages], tools)
        assert isinstance(request.prompt, str)
        return tokenizer.encode(request.prompt)

    return work() if num_bytes <= MAX_INLINE_BYTES else await asyncio.to_thread(work)


def check_ids(prompt: list[int], vocab_size: int) -> None:
    """Raises `InvalidRequestError` naming the first token id that is none."""
    if max(prompt) >= vocab_size:
        index = next(index for index, each in enumerate(prompt) if each >= vocab_size)
        raise InvalidRequestError(
            f"prompt[{index}]: token ids are integers from 0 to {vocab_size - 1} (got {prompt[index]})",
            param=f"prompt[{index}]",
        )


# --- tools ---------------------------------------------------------------------------------------------------


def check_tools(request: Request, tier: Tier) -> None:
    """Raises `InvalidRequestError` when `request` asks of tools what the tier's model cannot do."""
    if not isinstance(request, ChatRequest):
        return
    if tier.tool_parser is not None:
        for index, tool in enumerate(request.offered_tools):
            if tool.function.strict and not request.must_call:
                param = f"tools[{index}].function.strict"
                raise InvalidRequestError(
                    f"{param}: only calls that tool_choice forces are held to a schema; remove it, or force the call",
                    param=param,
                )
        return
    for index, message in enumerate(request.messages):
        if message.role == "tool" or message.tool_calls:
            param = f"messages[{index}].role" if message.role == "tool" else f"messages[{index}].tool_calls"
            raise NoToolParserError(f"{param}: the model {tier.model!r} has no tool parser", param=param)
    if request.offered_tools:
        raise NoToolParserError(
            f"tools: the model {tier.model!r} has no tool parser; leave tools out, or name a model that has one",
            param="tools",
        )


def choose_parser(request: Request, tier: Tier) -> ToolParser | None:
    """What takes the calls out of an answer's text; None without tools."""
    if not isinstance(request, ChatRequest) or not request.offered_tools or tier.tool_parser is None:
        return None
    names = {tool.function.name for tool in request.offered_tools}
    # A forced call is guided to be the bare object.
    form: ToolFormat = "llama3" if request.must_call else tier.tool_parser
    return create_tool_parser(form, names, whole=not request.stream, only_one=request.parallel_tool_calls is False)


def forced_call_guide(request: Request) -> Guide | None:
    """The schema of the one call that `tool_choice` forces; None when it forces none.

    Raises `InvalidRequestError` when two tools define one name differently: one schema holds them all.
    """
    if not isinstance(request, ChatRequest) or not request.must_call:
        return None
    definitions: dict[str, dict[str, Any]] = {"$defs": {}, "definitions": {}}
    calls = []
    for index, tool in enumerate(request.offered_tools):
        check_schema(tool.function.parameters or {}, f"tools[{index}].function.parameters")
        name, parameters = tool.function.name, dict(tool.function.parameters or {"type": "object"})
        if isinstance(request.tool_choice, ToolChoice) and name != request.tool_choice.function.name:
            continue
        # References count from the root of the schema, so the definitions move there.
        for word, all_of_them in definitions.items():
            for key, definition in parameters.pop(word, {}).items():
                if all_of_them.setdefault(key, definition) != definition:
                    raise InvalidRequestError(
                        f"tools: two of them define {word} {shorten(key)} differently", param="tools"
                    )
        properties = {"name": {"const": name}, "arguments": parameters}
        calls.append(
            {
                "type": "object",
                "properties": properties,
                "required": ["name", "arguments"],
                "additionalProperties": False,
            }
        )
    schema: dict[str, Any] = calls[0] if len(calls) == 1 else {"anyOf": calls}
    schema |= {word: all_of_them for word, all_of_them in definitions.items() if all_of_them}
    return Guide("json_schema", json.dumps(schema, ensure_ascii=False), "tools")


def template_message(message: Message) -> dict[str, Any]:
    """`message` as chat templates read it: arguments as an object, "developer" by its older name."""
    row: dict[str, Any] = {"role": "system" if message.role == "developer" else message.role, "content": message.text()}
    if message.tool_calls is not None:
        row["tool_calls"] = [
            {
                "id": call.id,
                "type": call.type,
                "function": {"name": call.function.name, "arguments": json.loads(call.function.arguments)},
            }
            for call in message.tool_calls
        ]
    if message.tool_call_id is not None:
        row["tool_call_id"] = message.tool_call_id
    return row if message.name is None else {**row, "name": message.name}


# --- the engine's share --------------------------------------------------------------------------------------


def limit_answer(request: Request, tier: Tier, num_prompt_tokens: int) -> int:
    """The most tokens that each choice may have.

    Raises `ContextWindowError` with both counts when prompt and answer do not fit the tier's context window.
    """
    room = tier.context_window - num_prompt_tokens
    wanted = request.output_limit
    if room < (wanted or 1):
        prompt = "messages" if isinstance(request, ChatRequest) else "prompt"
        param = prompt if wanted is None or room < 1 else request.output_limit_field
        raise ContextWindowError(
            f"{param}: the prompt's {num_prompt_tokens} tokens and an answer of up to {wanted or 1} are more than the "
            f"context window of {tier.context_window} tokens; shorten the {prompt} or lower "
            f"{request.output_limit_field}",
            param=param,
        )
    return wanted or min(tier.generation.max_output_tokens, room)


def build_engine_request(request: Request, tier: Tier, input_ids: list[int], guide: Guide | None) -> EngineRequest:
    """The engine's share of `request` for its first choice, the tier's generation policy filled in.

    Raises `InvalidRequestError` as `limit_answer` does, and when `min_tokens` is more than that.
    """
    policy = tier.generation
    max_new_tokens = limit_answer(request, tier, len(input_ids))
    if (request.min_tokens or 0) > max_new_tokens:
        raise InvalidRequestError(
            f"min_tokens: {request.min_tokens} is more than the answer's limit of {max_new_tokens} tokens",
            param="min_tokens",
        )
    temperature = policy.temperature if request.temperature is None else request.temperature
    return EngineRequest(
        request_id=uuid.uuid4().hex,  # never the caller's: one client could stop another's
        input_ids=input_ids,
        max_new_tokens=max_new_tokens,
        end_id=None if request.ignore_eos else tier.end_id,
        min_tokens=request.min_tokens or 0,
        sample=temperature >= MIN_TEMPERATURE,
        temperature=max(temperature, MIN_TEMPERATURE),
        top_k=request.top_k or 0,
        top_p=policy.top_p if request.top_p is None else request.top_p,
        repetition_penalty=1.0 if request.repetition_penalty is None else request.repetition_penalty,
        presence_penalty=request.presence_penalty or 0.0,
        frequency_penalty=request.frequency_penalty or 0.0,
        seed=request.seed,
        log_probs=request.wants_log_probs,
        guide_type=None if guide is None else guide.type,
        guide=None if guide is None else guide.text,
        lora=None if tier.adapter is None else Lora(tier.adapter.task_id, tier.adapter.folder),
    )


def for_choice(request: EngineRequest, index: int) -> EngineRequest:
    """The request of another choice: an id of its own and, so that they differ, a seed of its own."""
    if index == 0:
        return request
    seed = None if request.seed is None else (request.seed + index) % 2**63
    return replace(request, request_id=uuid.uuid4().hex, seed=seed)
