"""The way from the orchestrator to an encoder of the same server (embedder or classifier): gRPC on loopback."""

from __future__ import annotations

import asyncio

import numpy as np
import numpy.typing as npt
from tritonclient.grpc import service_pb2

from orchestrator import contracts
from orchestrator.contracts import TensorSpec
from orchestrator.infer_streams import InferStreams
from orchestrator.wire import add_row, read_outputs


class EncoderClient:
    """For one event loop."""

    def __init__(self, url: str, model: str, output: TensorSpec) -> None:
        """`url` is host:port of Triton's gRPC service, not used before the first text; `output` is FP32."""
        self._model = model
        self._output = output
        self._streams = InferStreams(url)
        self._running: set[asyncio.Task[npt.NDArray[np.float32]]] = set()

    async def encode(self, input_ids: npt.NDArray[np.int32]) -> npt.NDArray[np.float32]:
        """INT32 [length], unpadded -> the output, FP32 [dimensions]. Raises `grpc.aio.AioRpcError`."""
        # Shielded: Triton leaks a request that is cancelled as it ends.
        task = asyncio.get_running_loop().create_task(self._infer(input_ids))
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        return await asyncio.shield(task)

    async def _infer(self, input_ids: npt.NDArray[np.int32]) -> npt.NDArray[np.float32]:
        request = service_pb2.ModelInferRequest(model_name=self._model)
        add_row(request, contracts.EMBEDDING_INPUT_IDS, *input_ids)
        add_row(request, contracts.ATTENTION_MASK, *np.ones_like(input_ids))
        response = await self._streams.stub.ModelInfer(request)
        return np.frombuffer(read_outputs(response)[self._output.name], np.float32)

    async def close(self) -> None:
        await asyncio.gather(*self._running, return_exceptions=True)
        await self._streams.close()
