"""What one event of an OpenAI-compatible stream says; fields that we do not use may be anything."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from orchestrator.errors import CloudError

DONE = "[DONE]"


class _Part(BaseModel):
    """APIs add fields of their own, and write null where OpenAI leaves a field out."""

    model_config = ConfigDict(frozen=True, extra="ignore")


class Usage(_Part):
    prompt_tokens: Annotated[int, Field(ge=0)]
    completion_tokens: Annotated[int, Field(ge=0)]
    completion_tokens_details: Any = None

    @property
    def reasoning_tokens(self) -> int:
        """Of the completion's, those that were for no reader; 0 where the API does not say."""
        details = self.completion_tokens_details
        number = details.get("reasoning_tokens") if isinstance(details, dict) else None
        return max(0, number) if isinstance(number, int) else 0


class FunctionDelta(_Part):
    name: str | None = None
    arguments: str | None = None


class CallDelta(_Part):
    index: int | None = None
    id: str | None = None
    function: FunctionDelta | None = None


class Delta(_Part):
    content: str | None = None
    refusal: str | None = None
    reasoning_content: Any = None
    reasoning: Any = None
    tool_calls: list[CallDelta] | None = None


class ChoiceDelta(_Part):
    index: int = 0
    delta: Delta | None = None
    finish_reason: Annotated[str, Field(max_length=64)] | None = None

    @property
    def text(self) -> str:
        """A refusal is text as well: what a reader sees is the same."""
        return "" if self.delta is None else (self.delta.content or "") + (self.delta.refusal or "")

    @property
    def reasoning(self) -> str:
        """What the model thought before it answered, by either of the names that APIs give it; not passed on."""
        either = () if self.delta is None else (self.delta.reasoning_content, self.delta.reasoning)
        return next((each for each in either if isinstance(each, str)), "")

    @property
    def calls(self) -> list[CallDelta]:
        return [] if self.delta is None else self.delta.tool_calls or []


class Event(_Part):
    """A chunk without choices carries usage, or nothing that concerns us; `error` ends the stream."""

    choices: list[ChoiceDelta] | None = None
    usage: Usage | None = None
    error: Any = None

    @property
    def is_progress(self) -> bool:
        """Whether an answer came further by it, or the thought before it."""
        return any(each.text or each.reasoning or each.calls or each.finish_reason for each in self.choices or [])


def parse_event(data: str, tier: str) -> Event:
    """The event in `data`; raises `CloudError` naming `tier` when it is none, or when it reports an error."""
    try:
        event = Event.model_validate_json(data)
    except ValidationError as error:
        fault = error.errors(include_url=False, include_context=False, include_input=False)[0]
        where = ".".join(str(part) for part in fault["loc"]) or "an event"
        raise CloudError(
            f"tier {tier!r}: the API sent what is no chat completion chunk: {where}: {fault['msg']}"
        ) from None
    if event.error is not None:
        raise CloudError(f"tier {tier!r}: the API reported an error in its stream")
    return event
