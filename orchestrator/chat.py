"""`python -m orchestrator chat`: talk to a running server in the terminal, with nothing but the standard library."""

from __future__ import annotations

import http.client
import json
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import urlsplit

TIMEOUT_S = 600.0


class ChatError(Exception):
    """The server cannot be reached, or answered with an error; the text says which."""


def ask(
    url: str, messages: list[dict[str, str]], model: str, write: Callable[[str], None], key: str | None = None
) -> tuple[str, dict[str, Any]]:
    """Stream one answer through `write`; returns its text and the facts of it. `key` is the API key, if one is needed.

    The facts: ttft_ms and total_ms as this client saw them, tokens, tps, input_tokens, model, tier, cache.
    Raises `ChatError`.
    """
    request = {"model": model, "messages": messages, "stream": True}
    started_s = time.monotonic()
    first_s, text = None, ""
    rt: dict[str, Any] = {}
    for event in _events(url, json.dumps(request).encode(), key):
        if "error" in event:
            raise ChatError(event["error"]["message"])
        for choice in event["choices"]:
            if delta := choice["delta"].get("content"):
                first_s = first_s or time.monotonic()
                text += delta
                write(delta)
        rt = event.get("rt", rt)
    if not rt:
        raise ChatError("the stream broke off before its last event")
    facts = {key: rt[key] for key in ("tokens", "tps", "input_tokens", "model", "tier", "cache")}
    ended_s = time.monotonic()
    ttft_ms = None if first_s is None else round((first_s - started_s) * 1000, 1)
    return text, {"ttft_ms": ttft_ms, "total_ms": round((ended_s - started_s) * 1000, 1), **facts}


def describe(facts: dict[str, Any]) -> str:
    """One line of facts for a person."""
    tps = "-" if facts["tps"] is None else f"{facts['tps']:.1f}"
    return (
        f"[tier {facts['tier']} | model {facts['model']} | first token {facts['ttft_ms']} ms | "
        f"{facts['tokens']} tokens | {tps} tokens/s | cache {facts['cache']}]"
    )


def chat_once(url: str, question: str, model: str, *, as_json: bool, key: str | None = None) -> None:
    """Ask one question; the answer goes to stdout as it comes, then the facts, then with `as_json` a JSON line."""
    _, facts = ask(url, [{"role": "user", "content": question}], model, _print_now, key)
    print(f"\n{describe(facts)}")
    if as_json:
        print(json.dumps(facts))


def chat_loop(url: str, model: str, key: str | None = None) -> None:
    """A conversation until end of input; the history is sent with every question."""
    messages: list[dict[str, str]] = []
    print("Type a question; Ctrl-D ends.", file=sys.stderr)
    while True:
        try:
            question = input("> ").strip()
        except EOFError:
            print()
            return
        if not question:
            continue
        messages.append({"role": "user", "content": question})
        try:
            text, facts = ask(url, messages, model, _print_now, key)
        except ChatError as error:
            messages.pop()
            print(f"\nerror: {error}", file=sys.stderr)
            continue
        messages.append({"role": "assistant", "content": text})
        print(f"\n{describe(facts)}")


def _print_now(text: str) -> None:
    print(text, end="", flush=True)


def _events(url: str, body: bytes, key: str | None) -> Iterator[dict[str, Any]]:
    address = urlsplit(url)
    connection = http.client.HTTPConnection(address.hostname or "127.0.0.1", address.port, timeout=TIMEOUT_S)
    try:
        authorization = {} if key is None else {"authorization": f"Bearer {key}"}
        headers = {"content-type": "application/json", **authorization}
        connection.request("POST", "/v1/chat/completions", body, headers)
        response = connection.getresponse()
        if response.status != 200:
            raise ChatError(f"HTTP {response.status}: {response.read().decode(errors='replace')}")
        for line in response:
            data = line.strip().removeprefix(b"data: ")
            if data == b"[DONE]":
                return
            if data:
                yield json.loads(data)
    except (OSError, http.client.HTTPException) as error:
        raise ChatError(f"{url}: {error}") from error
    finally:
        connection.close()
