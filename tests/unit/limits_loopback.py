"""The orchestrator's operations on limits, in this process, behind the streams that their client writes to."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tritonclient.grpc import service_pb2

from orchestrator import contracts
from orchestrator.call import Call
from orchestrator.config import Limits
from orchestrator.errors import ApiError
from orchestrator.limits.client import LimitsClient
from orchestrator.limits.gate import Gate
from orchestrator.limits.keys import Keyring, digest_of
from orchestrator.limits.ledger import Amount, MemoryLedger, Quota, Standing
from orchestrator.limits.operations import Operations
from orchestrator.wire import add_string, error_response, read_texts


class Beside:
    """Operations, their client, and who may what. A key's secret is its id."""

    def __init__(self, folder: Path | None = None, limits: Limits | None = None, **keys: dict[str, Any]) -> None:
        """Without a `folder` there are no keys."""
        self.ledger = MemoryLedger()
        keyring = None
        if folder is not None:
            rows = [{"id": name, "tenant": name, "digest": digest_of(name), **rights} for name, rights in keys.items()]
            (folder / "keys.json").write_text(json.dumps({"keys": rows}))
            keyring = Keyring(folder / "keys.json")
        self.gate = Gate(keyring, self.ledger)
        self.operations = Operations(self.gate, 256, limits or Limits())
        self.asked: list[str] = []
        self.calls: dict[str, Call] = {}
        self.client = LimitsClient(self, with_keys=folder is not None)  # type: ignore[arg-type]

    async def used(self, name: str) -> Amount:
        standing = Standing(Quota(), await self.ledger.reserve(name, Quota(), Amount()))
        return Amount(*(standing.used(kind) for kind in "rtm"))

    @property
    def num_running(self) -> dict[str, int]:
        return {model: queue._num_running for model, queue in self.operations._queues.items()}

    async def settled(self) -> None:
        """Until no place is taken."""
        while any(self.num_running.values()) or self.calls:
            await asyncio.sleep(0.001)

    # --- as `InferStreams` ---

    def borrow(self, model: str) -> Stream:
        return Stream(self)

    async def give_back(self, stream: Stream) -> None:
        assert stream.num_open == 0


class Stream:
    """As `InferStream`, for one request and its cancel."""

    def __init__(self, beside: Beside) -> None:
        self.num_open = 0
        self._beside = beside
        self._responses: asyncio.Queue[Any] = asyncio.Queue()

    async def send(self, request: Any) -> None:
        self.num_open += 1
        if contracts.CANCEL_PARAMETER in request.parameters:
            self.put(service_pb2.ModelStreamInferResponse(), final=True)
            if call := self._beside.calls.get(request.id):
                await call.cancel()
            return
        parameters = {name: value.string_param for name, value in request.parameters.items()}
        self._beside.asked.append(parameters[contracts.LIMITS_OPERATION_PARAMETER])
        (body,) = read_texts(request)
        call = self._beside.calls[request.id] = Call(body, parameters, Sink(self, request.id))
        asyncio.create_task(self._beside.operations.run(call)).add_done_callback(
            lambda _: self._beside.calls.pop(request.id)
        )

    def put(self, response: Any, *, final: bool) -> None:
        response.infer_response.parameters["triton_final_response"].bool_param = final
        self._responses.put_nowait(response)

    async def receive(self) -> Any:
        response = await self._responses.get()
        self.num_open -= response.infer_response.parameters["triton_final_response"].bool_param
        return response

    async def drain(self) -> None:
        while self.num_open:
            await self.receive()

    def give_up(self) -> None:
        raise AssertionError("nothing was said of the end")


class Sink:
    def __init__(self, stream: Stream, request_id: str) -> None:
        self._stream = stream
        self._id = request_id
        self._headers: Mapping[str, str] = {}

    def announce(self, headers: Mapping[str, str]) -> None:
        self._headers = headers

    def send(self, event: str, *, final: bool) -> None:
        response = service_pb2.ModelStreamInferResponse()
        message = service_pb2.ModelInferRequest()  # whose inputs are built as these outputs are
        for spec, text in ((contracts.EVENT, event), (contracts.HEADERS, json.dumps(dict(self._headers)))):
            add_string(message, spec, text.encode())
            response.infer_response.outputs.add(name=spec.name, datatype="BYTES", shape=(1,))
        response.infer_response.raw_output_contents.extend(message.raw_input_contents)
        self._stream.put(response, final=final)

    def fail(self, error: ApiError) -> None:
        self._stream.put(error_response(self._id, error.to_message()), final=True)
