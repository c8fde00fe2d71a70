"""The description that `/openapi.json` serves: paths by hand, the request's schema from the model that checks it."""

from __future__ import annotations

from typing import Any

from orchestrator import __version__
from orchestrator.cache.operations import Invalidation, WrongHit
from orchestrator.contracts import EMBEDDING_DIMENSIONS, OCR_MODEL
from orchestrator.embedding.request import EmbeddingRequest
from orchestrator.gateway.ocr import FILE_FIELD as IMAGE_FIELD
from orchestrator.gateway.ocr import FORM, MODEL_FIELD, OCR_PATH, RAW
from orchestrator.gateway.realtime import REALTIME_PATH
from orchestrator.gateway.speech import SPEECH_PATH
from orchestrator.gateway.transcriptions import FILE_FIELD, TRANSCRIPTIONS_PATH
from orchestrator.request import ChatRequest, CompletionRequest
from orchestrator.voice.request import GRANULARITIES_FIELD, SpeechRequest, TranscriptionRequest

_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": "string"},
            },
        }
    },
}


def _json(description: str, schema: dict[str, Any] | None = None) -> dict[str, Any]:
    return {"description": description, "content": {"application/json": {"schema": schema or {"type": "object"}}}}


def _errors(**descriptions: str) -> dict[str, Any]:
    """Responses by ``s<status>``."""
    schema = {"$ref": "#/components/schemas/Error"}
    return {status.removeprefix("s"): _json(description, schema) for status, description in descriptions.items()}


# The guard's, on every path.
_REFUSED = _errors(
    s400="x-request-id is not allowed, or a header came twice",
    s403="a web page of another origin",
    s421="not a name of this server",
)


_FAILED = _errors(
    s400="a field is not allowed; `param` names it",
    s401="no valid key, where the server has keys",
    s403="a web page of another origin, or not allowed to this key",
    s404="no such model",
    s408="the request took too long to arrive",
    s413="the request is too large",
    s415="the body is not declared as what this path takes",
    s429="a quota is used up; `retry-after` says until when",
    s500="ours",
    s502="the engine failed",
    s503="overloaded, shutting down, or the tier is out; `retry-after` says until when",
    s504="only-if-cached, and there is no stored answer; or the deadline has passed",
)
_KEYS = _errors(
    s401="no valid key, where the server has keys", s403="a web page of another origin, or not allowed to this key"
)


_RT: dict[str, Any] = {
    "type": "object",
    "description": "What this server says of the answer; in a stream it is in the last event",
    "properties": {
        "tier": {"type": "string"},
        "model": {"type": "string"},
        "cache": {"enum": ["exact", "semantic", "miss", "bypass"]},
        "reason": {"type": "string", "description": "Why this tier; not of stored answers"},
        "attempts": {
            "type": "integer",
            "minimum": 2,
            "description": "Where the first one failed before its first token",
        },
        "prompt_tokens_saved": {"type": "integer", "minimum": 1, "description": "By prompt compression"},
        "ttft_ms": {"type": ["number", "null"]},
        "total_ms": {"type": "number"},
        "stages_ms": {
            "type": "object",
            "description": "The parts of total_ms, in order",
            "additionalProperties": {"type": "number"},
        },
        "input_tokens": {"type": "integer"},
        "tokens": {"type": "integer"},
        "cost_usd": {"type": "number"},
    },
}


def describe() -> dict[str, Any]:
    """An OpenAPI 3.1 document."""
    requests, parts = {}, {}
    for kind in (ChatRequest, CompletionRequest, EmbeddingRequest, SpeechRequest, WrongHit, Invalidation):
        schema = kind.model_json_schema(ref_template="#/components/schemas/{model}")
        parts.update(schema.pop("$defs", {}))
        requests[kind.__name__] = schema
    models = {"type": "object", "required": ["object", "data"]}
    status = {"type": "object", "required": ["status"]}
    return {
        "openapi": "3.1.0",
        "info": {"title": "triton-realtime", "version": __version__, "description": "OpenAI's API on NVIDIA Triton"},
        "paths": {
            "/v1/chat/completions": {"post": _generation("createChatCompletion", ChatRequest)},
            "/v1/completions": {"post": _generation("createCompletion", CompletionRequest)},
            "/v1/embeddings": {"post": _embeddings()},
            OCR_PATH: {"post": _ocr()},
            TRANSCRIPTIONS_PATH: {"post": _transcription()},
            SPEECH_PATH: {"post": _speech()},
            REALTIME_PATH: {"get": _realtime()},
            "/v1/rt/cache/wrong": {"post": _operation("markCacheHitWrong", "WrongHit", "The stored answer is gone")},
            "/v1/rt/cache/invalidate": {
                "post": _operation("invalidateCache", "Invalidation", "What was removed, or would be")
            },
            "/v1/models": {"get": {"responses": {"200": _json("What `model` may be", models), **_REFUSED, **_KEYS}}},
            "/health": {"get": {"responses": {"200": _json("The gateway lives", status), **_REFUSED}}},
            "/ready": {
                "get": {
                    "responses": {"200": _json("All is ready", status), "503": _json("Not yet", status), **_REFUSED}
                }
            },
            "/metrics": {
                "get": {
                    "responses": {
                        "200": {
                            "description": "Prometheus' text format: the gateway's metrics and Triton's",
                            "content": {"text/plain": {"schema": {"type": "string"}}},
                        },
                        **_REFUSED,
                        **_KEYS,
                    }
                }
            },
        },
        "components": {"schemas": {**requests, "Error": _ERROR, **parts}},
    }


def _generation(name: str, request: type[ChatRequest] | type[CompletionRequest]) -> dict[str, Any]:
    schema = {"$ref": f"#/components/schemas/{request.__name__}"}
    return {
        "operationId": name,
        "requestBody": {"required": True, "content": {"application/json": {"schema": schema}}},
        "responses": {
            "200": {
                "description": "The answer: with `stream` as server-sent events, the last one `[DONE]`",
                "content": {
                    "application/json": {
                        "schema": {
                            "type": "object",
                            "required": ["id", "object", "choices"],
                            "properties": {"rt": _RT},
                        }
                    },
                    "text/event-stream": {},
                },
            },
            **_REFUSED,
            **_FAILED,
        },
    }


def _operation(name: str, schema: str, outcome: str) -> dict[str, Any]:
    return {
        "operationId": name,
        "description": "Only from the machine itself.",
        "requestBody": {
            "required": True,
            "content": {"application/json": {"schema": {"$ref": f"#/components/schemas/{schema}"}}},
        },
        "responses": {"200": _json(outcome), **_REFUSED, **_FAILED},
    }


def _realtime() -> dict[str, Any]:
    """OpenAPI knows no WebSockets."""
    answers = _errors(s426="asked by plain HTTP")
    return {
        "description": "A WebSocket: OpenAI's Realtime API, in docs/realtime.md",
        "responses": {**_REFUSED, **answers},
    }


def _embeddings() -> dict[str, Any]:
    numbers = {"type": "array", "items": {"type": "number"}, "minItems": EMBEDDING_DIMENSIONS}
    base64 = {"type": "string", "description": "little-endian FP32 as base64"}
    one = {
        "type": "object",
        "required": ["object", "index", "embedding"],
        "properties": {"index": {"type": "integer"}, "embedding": {"anyOf": [numbers, base64]}},
    }
    answer = {
        "type": "object",
        "required": ["object", "data", "model", "usage"],
        "properties": {"data": {"type": "array", "items": one}, "model": {"type": "string"}},
    }
    return {
        "operationId": "createEmbedding",
        "requestBody": {
            "required": True,
            "content": {"application/json": {"schema": {"$ref": "#/components/schemas/EmbeddingRequest"}}},
        },
        "responses": {"200": _json("An embedding for each input, in their order", answer), **_REFUSED, **_FAILED},
    }


def _ocr() -> dict[str, Any]:
    image = {"type": "string", "format": "binary", "description": "PNG, JPEG or WebP"}
    form = {
        "type": "object",
        "required": [IMAGE_FIELD],
        "properties": {IMAGE_FIELD: image, MODEL_FIELD: {"const": OCR_MODEL}},
        "additionalProperties": False,
    }
    point = {"type": "array", "items": {"type": "number"}, "minItems": 2, "maxItems": 2}
    line = {
        "type": "object",
        "required": ["text", "score", "box"],
        "properties": {
            "text": {"type": "string"},
            "score": {"type": "number"},
            "box": {
                "type": "array",
                "items": point,
                "minItems": 4,
                "maxItems": 4,
                "description": "corners, x and y in pixels of the upright image, in the order in which the text reads",
            },
        },
    }
    answer = {
        "type": "object",
        "required": ["object", "model", "width", "height", "text", "lines"],
        "properties": {
            "width": {"type": "integer"},
            "height": {"type": "integer"},
            "text": {"type": "string", "description": "the lines, in reading order"},
            "lines": {"type": "array", "items": line},
        },
    }
    content = {FORM: {"schema": form}, **{media_type: {"schema": image} for media_type in RAW}}
    return {
        "operationId": "readImage",
        "requestBody": {"required": True, "content": content},
        "responses": {"200": _json("The text of the image, by line", answer), **_REFUSED, **_FAILED},
    }


def _transcription() -> dict[str, Any]:
    schema = TranscriptionRequest.model_json_schema()
    properties = schema["properties"]
    properties[GRANULARITIES_FIELD] = properties.pop("timestamp_granularities")
    properties[FILE_FIELD] = {
        "type": "string",
        "format": "binary",
        "description": "WAV, FLAC, Ogg or MP3: at most 25 MiB, and half an hour",
    }
    schema["required"] = [FILE_FIELD, *schema["required"]]
    words = {"type": "array", "items": {"type": "object", "required": ["word", "start", "end"]}}
    segments = {
        "type": "array",
        "items": {"type": "object", "required": ["id", "start", "end", "text"]},
        "description": "`tokens` is empty and `seek` 0 in each",
    }
    answer = {
        "type": "object",
        "required": ["text", "usage"],
        "properties": {
            "text": {"type": "string", "description": "empty where nobody speaks"},
            "duration": {"type": "number", "description": "seconds"},
            "words": words,
            "segments": segments,
        },
    }
    ok = _json("What is said", answer)
    ok["content"] |= {"text/plain": {"schema": {"type": "string"}}, "text/vtt": {"schema": {"type": "string"}}}
    return {
        "operationId": "createTranscription",
        "requestBody": {"required": True, "content": {"multipart/form-data": {"schema": schema}}},
        "responses": {"200": ok, **_REFUSED, **_FAILED},
    }


def _speech() -> dict[str, Any]:
    sound = {"schema": {"type": "string", "format": "binary"}}
    return {
        "operationId": "createSpeech",
        "requestBody": {
            "required": True,
            "content": {"application/json": {"schema": {"$ref": "#/components/schemas/SpeechRequest"}}},
        },
        "responses": {
            "200": {
                "description": "The sound as it is made. `pcm` is 24 kHz, 16 bits, one channel",
                "content": {"audio/wav": sound, "audio/pcm": sound},
            },
            **_REFUSED,
            **_FAILED,
        },
    }
