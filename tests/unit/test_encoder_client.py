"""What the orchestrator asks encoders: unpadded, and by Triton's priority where the model has one."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
from tritonclient.grpc import service_pb2

from orchestrator import contracts
from orchestrator.triton import encoder_client
from orchestrator.triton.encoder_client import EncoderClient


class Streams:
    """In the place of `InferStreams`: remembers what is asked, and answers two numbers."""

    def __init__(self, url: str) -> None:
        self.stub, self.asked = self, []  # type: tuple[Any, list[Any]]

    async def ModelInfer(self, request: Any) -> Any:
        self.asked.append(request)
        response = service_pb2.ModelInferResponse(raw_output_contents=[np.float32([0.6, 0.8]).tobytes()])
        response.outputs.add(name=contracts.EMBEDDING.name)
        return response

    async def close(self) -> None:
        pass


@pytest.mark.parametrize(("priority", "sent"), [(None, {}), (1, {"priority": 1})])
def test_a_question_is_sent_as_it_is_with_its_priority(
    monkeypatch: pytest.MonkeyPatch, priority: int | None, sent: dict[str, int]
) -> None:
    monkeypatch.setattr(encoder_client, "InferStreams", Streams)

    async def ask() -> Any:
        client = EncoderClient("127.0.0.1:1", "embedding_encoder", contracts.EMBEDDING, priority)
        vector = await client.encode(np.int32([101, 7, 102]))
        (request,) = client._streams.asked  # type: ignore[attr-defined]
        await client.close()
        return vector, request

    vector, request = asyncio.run(ask())
    assert vector.tolist() == pytest.approx([0.6, 0.8])
    assert request.model_name == "embedding_encoder"
    assert {name: each.uint64_param for name, each in request.parameters.items()} == sent
    assert [list(tensor.shape) for tensor in request.inputs] == [[1, 3], [1, 3]]
