"""An OpenAI-compatible API on loopback that answers byte by byte as a test says, well or badly."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

DONE = b"data: [DONE]\n\n"


def event(**fields: Any) -> bytes:
    return f"data: {json.dumps(fields, ensure_ascii=False)}\n\n".encode()


def delta(text: str | None = None, index: int = 0, finish: str | None = None, **more: Any) -> bytes:
    body = more if text is None else {"content": text, **more}
    return event(id="x", model="theirs", choices=[{"index": index, "delta": body, "finish_reason": finish}])


def usage(prompt_tokens: int, completion_tokens: int) -> bytes:
    counts = {"prompt_tokens": prompt_tokens, "completion_tokens": completion_tokens, "total_tokens": 0}
    return event(choices=[], usage={**counts, "prompt_tokens_details": None})


def answer(*texts: str, finish: str = "stop") -> list[bytes]:
    """A good answer: the role, a delta a text, the finish reason, usage of 11 and one token a text, the end."""
    deltas = [delta(text) for text in texts]
    return [delta("", role="assistant"), *deltas, delta(finish=finish), usage(11, len(texts)), DONE]


@dataclass
class Reply:
    """A number among `parts` is a pause in seconds; `end` is what follows them."""

    parts: Sequence[bytes | float]
    status: str = "200 OK"
    content_type: str = "text/event-stream; charset=utf-8"
    headers: Sequence[str] = ()
    end: Literal["whole", "cut", "hang"] = "whole"


@dataclass
class Got:
    """A request as it arrived."""

    line: str
    headers: dict[str, str]
    body: dict[str, Any]


@dataclass
class FakeCloud:
    """`num_left` counts the callers that closed the connection before the answer's end."""

    reply: Reply = field(default_factory=lambda: Reply(answer("Hi")))
    url: str = ""
    got: list[Got] = field(default_factory=list)
    num_connections: int = 0
    num_left: int = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        try:
            while await self._answer(reader, writer):
                pass
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Whether the connection stays."""
        line, *rows = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        headers = {name.lower(): value.strip() for name, _, value in (row.partition(":") for row in rows) if name}
        body = json.loads(await reader.readexactly(int(headers["content-length"])))
        self.got.append(Got(line, headers, body))
        reply = self.reply
        rows = [f"HTTP/1.1 {reply.status}", f"content-type: {reply.content_type}", "transfer-encoding: chunked"]
        writer.write("\r\n".join([*rows, *reply.headers, "", ""]).encode())
        for part in reply.parts:
            if isinstance(part, float):
                if await self._leaves(reader, part):
                    return False
            else:
                writer.write(f"{len(part):x}\r\n".encode() + part + b"\r\n")
                try:
                    await writer.drain()
                except ConnectionError:  # left while this was sent
                    self.num_left += 1
                    return False
        if reply.end == "whole":
            writer.write(b"0\r\n\r\n")
        elif reply.end == "hang":
            await self._leaves(reader, 30.0)
        return reply.end == "whole"

    async def _leaves(self, reader: asyncio.StreamReader, within_s: float) -> bool:
        try:
            await asyncio.wait_for(reader.read(1), within_s)
        except asyncio.TimeoutError:
            return False
        except ConnectionError:  # left with unread bytes
            pass
        self.num_left += 1
        return True


@contextmanager
def fake_cloud() -> Iterator[FakeCloud]:
    """One on a free port, on a thread of its own."""
    cloud, loop = FakeCloud(), asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()

    async def start() -> asyncio.Server:
        return await asyncio.start_server(cloud.serve, "127.0.0.1", 0)

    async def stop() -> None:
        server.close()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        await asyncio.sleep(0)  # the transports close

    server = asyncio.run_coroutine_threadsafe(start(), loop).result(10)
    cloud.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"
    try:
        yield cloud
    finally:
        asyncio.run_coroutine_threadsafe(stop(), loop).result(10)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
