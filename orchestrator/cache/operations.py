"""What an operator may do to the cache: say that a hit was wrong, invalidate. JSON in, JSON out."""

from __future__ import annotations

import json
from collections.abc import Mapping
from types import MappingProxyType
from typing import TypeVar

from pydantic import Field, ValidationError

from orchestrator.cache.stage import AnswerCache
from orchestrator.cache.store import Selection, StoreError
from orchestrator.errors import InvalidRequestError, StoreUnavailableError, shorten
from orchestrator.request import Strict, check_size, explain

StrictT = TypeVar("StrictT", bound=Strict)


class WrongHit(Strict):
    """`id` is the answer's, as its caller got it."""

    id: str


class Invalidation(Strict):
    """As `orchestrator.cache.store.Selection`, `model` may be a tier. Nothing is removed unless `dry_run` is false."""

    tenant: str | None = None
    model: str | None = None
    older_than_s: float | None = Field(default=None, ge=0, allow_inf_nan=False)
    text: str | None = Field(default=None, min_length=1)
    everything: bool = False
    dry_run: bool = True


async def operate(
    cache: AnswerCache | None, operation: str, body: bytes, models: Mapping[str, str] = MappingProxyType({})
) -> str:
    """Do `operation` ("wrong" or "invalidate"); returns its outcome as JSON. `models` has each tier's, by its name.

    Raises `InvalidRequestError` for an operation or a body that is not allowed, and where there is no cache;
    `StoreUnavailableError` when it may not be done.
    """
    if cache is None:
        raise InvalidRequestError("the cache is off here; a table [cache] in the target's row turns it on")
    try:
        return await _operate(cache, operation, body, models)
    except StoreError as error:
        raise StoreUnavailableError(f"the cache's store: {error}; try again later") from error


async def _operate(cache: AnswerCache, operation: str, body: bytes, models: Mapping[str, str]) -> str:
    if operation == "wrong":
        answer_id = _parse(body, WrongHit).id
        if not await cache.mark_wrong(answer_id.removeprefix("chatcmpl-")):
            raise InvalidRequestError(
                f"id: {shorten(answer_id)} is not the id of a recent answer out of the cache", param="id"
            )
        return json.dumps({"id": answer_id, "evicted": True})
    if operation == "invalidate":
        wanted = _parse(body, Invalidation)
        try:
            model = models.get(wanted.model, wanted.model) if wanted.model is not None else None
            selection = Selection(**{**wanted.model_dump(exclude={"dry_run"}), "model": model})
        except ValueError as error:
            raise InvalidRequestError(
                "give tenant, model, older_than_s or text to choose entries, or everything: true alone"
            ) from error
        removed = await cache.invalidate(selection, dry_run=wanted.dry_run)
        return json.dumps({**removed._asdict(), "dry_run": wanted.dry_run})
    raise InvalidRequestError(f"operation: {shorten(operation)} does not exist; one of wrong, invalidate")


def _parse(body: bytes, kind: type[StrictT]) -> StrictT:
    check_size(body)
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        raise explain(error) from error
