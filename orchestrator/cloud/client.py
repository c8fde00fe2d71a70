"""One pooled HTTP client for all cloud tiers: a chat completion as events, every fault a `CloudError` or its like.

No error and no log line holds a key, and of what an API says only a refusal of the request, cut short.
"""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import AsyncGenerator, Awaitable, Iterable, Mapping
from contextlib import aclosing
from email.utils import parsedate_to_datetime
from typing import Any, TypeVar, cast

import anyio
import httpx

from orchestrator.cloud import http2
from orchestrator.cloud.events import DONE, Event, parse_event
from orchestrator.cloud.sse import SseError, SseParser
from orchestrator.config import Cloud, ConfigError, Tier
from orchestrator.errors import (
    ApiError,
    CloudError,
    CloudRefusalError,
    CloudRequestError,
    CloudTimeoutError,
    OverloadedError,
)

# Idle connections kept for the next request, and how long: below the minute after which many servers drop them.
MAX_IDLE_CONNECTIONS = 32
KEEP_IDLE_S = 50.0
# Of an error's body, read; of its message, passed on.
MAX_ERROR_BYTES = 16 << 10
MAX_ERROR_CHARACTERS = 300
# The longest that an API may have our callers wait.
MAX_RETRY_AFTER_S = 3600
# An answer that is over does not wait longer for the sake of its connection.
END_TIMEOUT_S = 0.1

T = TypeVar("T")


class HttpCloudClient:
    """A `CloudClient` over HTTP/2, or HTTP/1.1 where the API speaks no other. For one event loop."""

    def __init__(self, tiers: Iterable[Tier], environ: Mapping[str, str]) -> None:
        """Sends nothing before the first request; raises `ConfigError` for a key that is missing or cannot be sent."""
        self._keys = {tier.name: read_key(tier, environ) for tier in tiers if tier.cloud is not None}
        # They log every request; at lower levels with its headers, and so with the key.
        for name in ("httpx", "httpcore", "hpack"):
            logging.getLogger(name).setLevel(logging.WARNING)
        http2.install()
        self._http = httpx.AsyncClient(
            http2=True,
            follow_redirects=False,  # the key and the prompt go where the operator said, and nowhere else
            limits=httpx.Limits(
                max_connections=None,  # the orchestrator's live requests are limited already
                max_keepalive_connections=MAX_IDLE_CONNECTIONS,
                keepalive_expiry=KEEP_IDLE_S,
            ),
        )

    async def stream(self, tier: Tier, body: Mapping[str, Any]) -> AsyncGenerator[Event, None]:
        assert tier.cloud is not None
        watch = _Watch(tier.name, tier.cloud)
        request = self._build_request(tier, tier.cloud, body)
        try:
            response = await watch.wait(self._http.send(request, stream=True))
            try:
                await self._check(tier, response, watch)
                parser = SseParser()
                async with aclosing(_chunks(response)) as chunks:
                    while (chunk := await watch.wait(anext(chunks, None))) is not None:
                        for data in parser.push(chunk):
                            if data == DONE:
                                await _read_to_end(chunks)
                                return
                            if data:
                                event = parse_event(data, tier.name)
                                if event.is_progress:
                                    watch.progress()
                                yield event
            finally:
                await response.aclose()
        except httpx.ConnectTimeout as error:
            text = f"tier {tier.name!r}: no connection within {tier.cloud.connect_timeout_s:g} s"
            raise CloudTimeoutError(text) from error
        except httpx.ConnectError as error:
            raise CloudError(f"tier {tier.name!r}: the API cannot be reached") from error
        except httpx.HTTPError as error:
            raise CloudError(f"tier {tier.name!r}: the connection failed ({type(error).__name__})") from error
        except SseError as error:
            raise CloudError(f"tier {tier.name!r}: the API sent no sensible stream: {error}") from error

    async def close(self) -> None:
        """Close every connection."""
        await self._http.aclose()

    def _build_request(self, tier: Tier, cloud: Cloud, body: Mapping[str, Any]) -> httpx.Request:
        headers = {
            "accept": "text/event-stream",
            "accept-encoding": "identity",  # a compressed stream comes in lumps
            "content-type": "application/json",
            "user-agent": "triton-realtime",
        }
        if key := self._keys[tier.name]:
            headers["authorization"] = f"Bearer {key}"
        timeout = httpx.Timeout(None, connect=cloud.connect_timeout_s)  # all else is the watch's matter
        return self._http.build_request(
            "POST",
            f"{cloud.base_url.rstrip('/')}/chat/completions",
            content=json.dumps(body, ensure_ascii=False).encode(),
            headers=headers,
            timeout=timeout,
        )

    async def _check(self, tier: Tier, response: httpx.Response, watch: _Watch) -> None:
        """Raises unless `response` is a stream of events."""
        status = response.status_code
        content_type = response.headers.get("content-type", "")
        if status != 200:
            message = self._redact(tier, await _read_message(response, watch))
            raise explain_status(tier.name, status, message, response.headers.get("retry-after", ""))
        if content_type.partition(";")[0].strip().lower() != "text/event-stream":
            raise CloudError(
                f"tier {tier.name!r}: the API must answer with text/event-stream (got {_shorten(content_type, 80)!r})"
            )

    def _redact(self, tier: Tier, text: str) -> str:
        key = self._keys[tier.name]
        return _shorten(text.replace(key, "[key]") if key else text, MAX_ERROR_CHARACTERS)


class _Watch:
    """The time a tier has for its next step: to the first token, then from token to token."""

    def __init__(self, tier: str, cloud: Cloud) -> None:
        self._tier = tier
        self._cloud = cloud
        self._has_token = False
        self._deadline_s = time.monotonic() + cloud.first_token_timeout_s

    def progress(self) -> None:
        self._has_token = True
        self._deadline_s = time.monotonic() + self._cloud.token_timeout_s

    async def wait(self, step: Awaitable[T]) -> T:
        """What `step` returns; raises `CloudTimeoutError` when that is not in time. Comments do not stop the clock."""
        # Before Python 3.12, asyncio's `wait_for` loses a cancellation that comes together with the result.
        with anyio.move_on_after(self._deadline_s - time.monotonic()):
            return await step
        if self._has_token:
            text = f"no further token within {self._cloud.token_timeout_s:g} s"
        else:
            text = f"no first token within {self._cloud.first_token_timeout_s:g} s"
        raise CloudTimeoutError(f"tier {self._tier!r}: {text}")


def read_key(tier: Tier, environ: Mapping[str, str]) -> str | None:
    """The key of a cloud tier, None if it takes none; raises `ConfigError` that names the variable, never its value."""
    name = None if tier.cloud is None else tier.cloud.key_env
    if name is None:
        return None
    key = environ.get(name, "").strip()
    if not key:
        raise ConfigError(f"tier {tier.name!r}: cloud.key_env: the environment variable {name} is not set; set it")
    if not (key.isascii() and key.isprintable()) or " " in key:
        raise ConfigError(f"tier {tier.name!r}: cloud.key_env: {name} must be printable ASCII without spaces")
    return key


def explain_status(tier: str, status: int, message: str, retry_after: str) -> ApiError:
    """The error for an answer other than 200. `message` and the header `retry-after` are the API's own.

    The message is shown only where the caller can act.
    """
    if status in (400, 413, 422):
        return CloudRequestError(f"tier {tier!r}: the API refused the request with {status}: {message}")
    if status == 429:
        return OverloadedError(
            f"tier {tier!r}: the API takes no more requests now (429); try again later",
            headers={"retry-after": str(read_retry_after(retry_after, time.time()))},
        )
    hint = ""
    if 300 <= status < 400:
        hint = "; redirects are not followed, so cloud.base_url must name where it leads"
    elif status in (401, 403):
        hint = "; check the key in the variable that cloud.key_env names"
    elif status == 404:
        hint = "; check cloud.base_url and cloud.model"
    kind = CloudError if status >= 500 else CloudRefusalError
    return kind(f"tier {tier!r}: the API answered {status}{hint}")


def read_retry_after(text: str, now_s: float) -> int:
    """Seconds from `now_s` (since 1970), 1 to `MAX_RETRY_AFTER_S`; 1 for what says nothing.

    RFC 9110, section 10.2.3: whole seconds, or a date; some APIs send parts of a second.
    """
    try:
        seconds = float(text)
    except ValueError:
        try:
            seconds = parsedate_to_datetime(text).timestamp() - now_s
        except (ValueError, OverflowError):
            seconds = 1.0
    return 1 if math.isnan(seconds) else math.ceil(min(max(1.0, seconds), MAX_RETRY_AFTER_S))


def _chunks(response: httpx.Response) -> AsyncGenerator[bytes, None]:
    # httpx promises less than it gives: only a generator can be closed.
    return cast(AsyncGenerator[bytes, None], response.aiter_bytes())


async def _read_to_end(chunks: AsyncGenerator[bytes, None]) -> None:
    """After the last event comes only the body's own end; a connection is used again only if that was read."""
    with anyio.move_on_after(END_TIMEOUT_S):
        await anext(chunks, None)


async def _read_message(response: httpx.Response, watch: _Watch) -> str:
    """OpenAI's error message in a body, or the beginning of another text."""
    body = b""
    async with aclosing(_chunks(response)) as chunks:
        while len(body) < MAX_ERROR_BYTES and (chunk := await watch.wait(anext(chunks, None))) is not None:
            body += chunk
    text = body[:MAX_ERROR_BYTES].decode(errors="replace")
    try:
        message = json.loads(text)["error"]["message"]
    except (ValueError, KeyError, TypeError, RecursionError):
        message = text
    return message if isinstance(message, str) else text


def _shorten(text: str, max_characters: int) -> str:
    text = " ".join("".join(each if each.isprintable() else " " for each in text).split())
    return text if len(text) <= max_characters else f"{text[: max_characters - 3]}..."
