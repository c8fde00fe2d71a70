"""The request of `/v1/embeddings`, every field checked."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import WithJsonSchema

from orchestrator.config import Embedder
from orchestrator.contracts import EMBEDDING_MODEL
from orchestrator.embedding.window import check_window
from orchestrator.errors import InvalidRequestError, ModelNotFoundError, shorten
from orchestrator.request import Strict, check_size, validate

MAX_INPUTS = 256

Input = str | list[int]  # a text, or the ids of its tokens with [CLS] and [SEP]

_TEXT = {"type": "string", "minLength": 1}
_IDS = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}


def _list_of(items: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "items": items, "minItems": 1, "maxItems": MAX_INPUTS}


class EmbeddingRequest(Strict):
    """One `/v1/embeddings` body. `encoding_format` "base64" is of little-endian FP32, as OpenAI's clients ask for it.

    `dimensions` can only be what the model has.
    """

    input: Annotated[Any, WithJsonSchema({"anyOf": [_TEXT, _IDS, _list_of(_TEXT), _list_of(_IDS)]})]
    model: str
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: Literal[384] | None = None
    user: str | None = None


def parse_embedding_request(body: bytes, embedder: Embedder) -> tuple[EmbeddingRequest, list[Input]]:
    """The request in `body`, and its inputs in order.

    Token ids may come with the embedder's [CLS] and [SEP] around them, as its tokenizer gives them; without, they get
    them. Raises `InvalidRequestError` naming the field, `ModelNotFoundError` or `RequestTooLargeError`.
    """
    check_size(body)
    request = validate(EmbeddingRequest, body)
    if request.model not in (EMBEDDING_MODEL, embedder.name):
        raise ModelNotFoundError(
            f"model: {shorten(request.model)} makes no embeddings; one of {EMBEDDING_MODEL}, {embedder.name}",
            param="model",
        )
    return request, _read_inputs(request.input, embedder)


def _read_inputs(given: Any, embedder: Embedder) -> list[Input]:
    if isinstance(given, str) or (isinstance(given, list) and given and all(map(_is_int, given))):
        return [_read_input(given, "input", embedder)]
    if not isinstance(given, list):
        raise _refused("input", "must be a text, a list of token ids, or a list of either", given)
    if not 0 < len(given) <= MAX_INPUTS:
        raise InvalidRequestError(f"input: must hold 1 to {MAX_INPUTS} inputs (got {len(given)})", param="input")
    kind = type(given[0])
    inputs = []
    for index, each in enumerate(given):
        field = f"input[{index}]"
        if kind not in (str, list) or not isinstance(each, kind):
            raise _refused(field, "must be a text or a list of token ids, and all of them the same", each)
        inputs.append(_read_input(each, field, embedder))
    return inputs


def _read_input(given: Any, field: str, embedder: Embedder) -> Input:
    if not given:
        raise InvalidRequestError(f"{field}: must not be empty", param=field)
    if isinstance(given, str):
        return given
    for each in given:
        if not _is_int(each) or not 0 <= each < embedder.vocab_size:
            raise _refused(field, f"token ids are integers from 0 to {embedder.vocab_size - 1}", each)
    if given[0] != embedder.cls_id or given[-1] != embedder.sep_id:
        given = [embedder.cls_id, *given, embedder.sep_id]
    check_window(len(given), embedder.max_input_tokens, field)
    return list(given)


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _refused(field: str, allowed: str, given: Any) -> InvalidRequestError:
    return InvalidRequestError(f"{field}: {allowed} (got {shorten(given)})", param=field)
