"""A stream that nobody reads to its end is reset over HTTP/2, and the connection's other streams go on."""

from __future__ import annotations

import asyncio
import json
import ssl
import subprocess
from contextlib import aclosing
from pathlib import Path
from typing import Any

import h2.config
import h2.connection
import h2.events
import pytest
from fake_cloud import DONE, delta

from orchestrator.cloud.client import HttpCloudClient
from orchestrator.cloud.events import Event
from orchestrator.config import Tier


class Http2Cloud:
    """Answers each stream with a token when it comes, and with the end when `finish` is called; counts resets."""

    def __init__(self) -> None:
        self.num_connections = 0
        self.resets: list[int] = []
        self.streams: list[int] = []

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        self.connection = h2.connection.H2Connection(h2.config.H2Configuration(client_side=False))
        self.writer = writer
        self.connection.initiate_connection()
        self.flush()
        while data := await reader.read(65536):
            for each in self.connection.receive_data(data):
                if isinstance(each, h2.events.StreamEnded):
                    self.begin(each.stream_id)
                elif isinstance(each, h2.events.StreamReset):
                    self.resets.append(each.stream_id)
                elif isinstance(each, h2.events.DataReceived):
                    self.connection.acknowledge_received_data(each.flow_controlled_length, each.stream_id)
            self.flush()
        writer.close()

    def begin(self, stream_id: int) -> None:
        self.streams.append(stream_id)
        if len(self.streams) != 2:  # the second waits for its first token
            headers = [(":status", "200"), ("content-type", "text/event-stream")]
            self.connection.send_headers(stream_id, headers)
            self.connection.send_data(stream_id, delta("Hi"))

    def finish(self, stream_id: int) -> None:
        self.connection.send_data(stream_id, delta(finish="stop") + DONE, end_stream=True)
        self.flush()

    def flush(self) -> None:
        self.writer.write(self.connection.data_to_send())


@pytest.fixture
def context(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ssl.SSLContext:
    """The server's, with a certificate that the client trusts."""
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1", "-subj", "/CN=127.0.0.1"),
            *("-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(key), "-out", str(cert)),
        ],
        check=True,
        capture_output=True,
        timeout=30,
    )
    monkeypatch.setenv("SSL_CERT_FILE", str(cert))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(cert, key)
    context.set_alpn_protocols(["h2"])
    return context


def test_leaving_resets_the_stream_alone(context: ssl.SSLContext) -> None:
    cloud = Http2Cloud()

    async def play() -> list[Event]:
        server = await asyncio.start_server(cloud.serve, "127.0.0.1", 0, ssl=context)
        client = HttpCloudClient([tier := make_tier(server.sockets[0].getsockname()[1])], {})
        async with aclosing(client.stream(tier, {})) as stays:
            events = [await anext(stays)]
            before_token = asyncio.create_task(read(client, tier))
            await until(lambda: len(cloud.streams) == 2)
            before_token.cancel()
            await asyncio.gather(before_token, return_exceptions=True)
            await until(lambda: cloud.resets == cloud.streams[1:2])
            async with aclosing(client.stream(tier, {})) as leaves:
                await anext(leaves)
            await until(lambda: cloud.resets == cloud.streams[1:3])
            cloud.finish(cloud.streams[0])
            events += [event async for event in stays]
        await client.close()
        server.close()
        await asyncio.sleep(0.05)  # the server's side closes
        return events

    events = asyncio.run(asyncio.wait_for(play(), 20))
    assert [event.choices[0].text for event in events if event.choices] == ["Hi", ""]
    assert cloud.num_connections == 1
    assert len(cloud.resets) == 2  # a stream that ended by itself is not reset


async def read(client: HttpCloudClient, tier: Tier) -> None:
    async for _ in client.stream(tier, {}):
        pass


async def until(ready: Any) -> None:
    for _ in range(1000):
        if ready():
            return
        await asyncio.sleep(0.005)
    raise AssertionError("waited in vain")


def make_tier(port: int) -> Tier:
    table = {"base_url": f"https://127.0.0.1:{port}/v1", "model": "m"}
    row = {"name": "cloud", "model": "large", "context_window": 1000, "generation": {"max_output_tokens": 4}}
    prices = {"input_price_per_million_tokens": 0, "output_price_per_million_tokens": 0}
    return Tier.model_validate_json(json.dumps({**row, **prices, "cloud": table}))
