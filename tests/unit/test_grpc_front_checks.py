"""What the gRPC front lets through to Triton."""

from __future__ import annotations

import re
import struct
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tritonclient.grpc import service_pb2

from orchestrator import contracts
from orchestrator.contracts import TensorSpec
from orchestrator.errors import ApiError, InvalidRequestError, ModelNotFoundError
from orchestrator.grpc_front import checks
from orchestrator.wire import add_string, new_request


def check_request(request: Any) -> None:
    checks.check_request(request, max_batch=8)


def make(body: bytes = b"{}", model: str = "orchestrator") -> Any:
    request = new_request(model, "mine")
    add_string(request, contracts.REQUEST, body)
    return request


def change(**fields: Any) -> Any:
    """A request whose one input has these fields."""
    request = make()
    for name, value in fields.items():
        if name == "shape":
            del request.inputs[0].shape[:]
            request.inputs[0].shape.extend(value)
        elif name == "raw":
            del request.raw_input_contents[:]
            request.raw_input_contents.extend(value)
        elif name == "bytes_contents":
            request.inputs[0].contents.bytes_contents.extend(value)
        else:
            setattr(request.inputs[0], name, value)
    return request


def with_parameter(name: str, **value: Any) -> Any:
    request = make()
    request.parameters[name].CopyFrom(service_pb2.InferParameter(**value))
    return request


def with_version(version: str) -> Any:
    request = make()
    request.model_version = version
    return request


def with_output(name: str) -> Any:
    request = make()
    request.outputs.add(name=name)
    return request


def test_the_version_and_the_outputs_that_exist_pass() -> None:
    check_request(with_version("1"))
    check_request(with_output("event"))


def twice() -> Any:
    request = make()
    add_string(request, contracts.REQUEST, b"{}")
    return request


@given(st.binary(max_size=200))
def test_every_body_of_the_contract_passes(body: bytes) -> None:
    check_request(make(body))


def test_the_typed_contents_pass() -> None:
    check_request(change(raw=[], bytes_contents=[b"{}"]))


@pytest.mark.parametrize("name", contracts.FORWARDED_HEADERS)
def test_headers_as_parameters_pass(name: str) -> None:
    check_request(with_parameter(name, string_param="5"))


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (
            with_parameter("cancel", bool_param=True),
            "parameters.cancel: is not allowed here; allowed are triton_enable",
        ),
        (with_parameter("priority", int64_param=1), "parameters.priority: is not allowed here"),
        (with_parameter("x" * 10_000, int64_param=1), f"parameters.{'x' * 80}: is not allowed here"),
        (
            with_parameter("triton_enable_empty_final_response", string_param="yes"),
            "parameters.triton_enable_empty_final_response: must be a bool",
        ),
        (with_parameter("authorization", bool_param=True), "parameters.authorization: must be a string"),
        (with_parameter("cache-control"), "parameters.cache-control: must be a string"),
        (with_parameter("x-deadline-ms", int64_param=5), "parameters.x-deadline-ms: must be a string"),
        *(
            (with_parameter("x-deadline-ms", string_param=text), "parameters.x-deadline-ms: must be a positive integer")
            for text in ("", "0", "-5", "1.5", "5 ", "soon", "\u0665", "9" * 30)
        ),
        (with_parameter("x-request-id", string_param="a b"), "parameters.x-request-id: must be 1 to 128 letters"),
        (with_output("events"), "outputs[0].name: 'events' is not one of event"),
        (new_request("orchestrator"), "inputs: must hold request once, and holds it 0 times"),
        (twice(), "inputs: must hold request once, and holds it 2 times"),
        (change(name="requests"), "inputs: must hold request once, and holds it 0 times"),
        (change(datatype="INT32"), "inputs[0].datatype: must be BYTES (got 'INT32')"),
        (change(shape=[]), "inputs[0].shape: must be [1] (got [])"),
        (change(shape=[2]), "inputs[0].shape: must be [1] (got [2])"),
        (change(shape=[-1]), "inputs[0].shape: must be [1] (got [-1])"),
        (change(shape=[1, 1]), "inputs[0].shape: must be [1] (got [1, 1])"),
        (change(raw=[b"", b""]), "raw_input_contents: has 2 parts for 1 inputs"),
        (change(raw=[b""]), "inputs[0]: raw_input_contents: must hold 1 elements, each after its length"),
        (change(raw=[b"\xff\xff\xff\xff{}"]), "inputs[0]: raw_input_contents: must hold 1 elements"),
        (change(raw=[b"\2\0\0"]), "inputs[0]: raw_input_contents: must hold 1 elements"),
        (change(raw=[struct.pack("<I", 1) + b"{}"]), "inputs[0]: raw_input_contents: must hold 1 elements"),
        (change(raw=[(struct.pack("<I", 1) + b"x") * 2]), "inputs[0]: raw_input_contents: must hold 1 elements"),
        (change(bytes_contents=[b"{}"]), "inputs[0].contents: must be empty beside raw_input_contents"),
        (change(raw=[]), "inputs[0].contents: must hold 1 of bytes_contents and nothing else"),
        (change(raw=[], bytes_contents=[b"{}"] * 2), "inputs[0].contents: must hold 1 of bytes_contents"),
    ],
)
def test_refused_by_name(request_: Any, message: str) -> None:
    with pytest.raises(InvalidRequestError, match=re.escape(message)):
        check_request(request_)


@pytest.mark.parametrize("part", ["inputs", "outputs"])
def test_tensor_parameters_are_refused(part: str) -> None:
    request = make()
    tensor = request.inputs[0] if part == "inputs" else request.outputs.add(name="event")
    tensor.parameters["shared_memory_region"].string_param = "mine"
    with pytest.raises(InvalidRequestError, match=rf"{part}\[0\].parameters.shared_memory_region: .* is not served"):
        check_request(request)


@pytest.mark.parametrize("model", ["llm_small", "", "orchestrator ", "x" * 1_000_000])
def test_a_model_that_is_not_public(model: str) -> None:
    with pytest.raises(ModelNotFoundError, match="does not exist here; one of orchestrator") as caught:
        check_request(make(model=model))
    assert len(str(caught.value)) < 300


def test_a_version_that_does_not_exist() -> None:
    with pytest.raises(ModelNotFoundError, match=r"^model_version: must be 1, or empty \(got '7'\)$"):
        check_request(with_version("7"))


@pytest.mark.parametrize("size", [1, 8, 9, 2**40])
def test_a_batch_of_texts_is_bounded_by_its_name(size: int) -> None:
    request = new_request("embedding")
    request.inputs.add(name="text", datatype="BYTES", shape=[size, 1])
    request.raw_input_contents.append((struct.pack("<I", 1) + b"x") * min(size, 9))
    if size <= 8:
        check_request(request)
        return
    with pytest.raises(InvalidRequestError) as got:
        check_request(request)
    assert got.value.message == f"inputs[0].shape: must be [-1, 1], -1 being 1 to 8 (got [{size}, 1])"
    assert got.value.param == "inputs[0].shape"


def test_tensors_of_fixed_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """No public model has one yet."""
    spec = TensorSpec("ids", "TYPE_INT32", (-1, 2))
    monkeypatch.setitem(contracts.FRONT_MODELS, "other", contracts.FrontModel((spec,), ()))
    for shape, raw, message in (
        ([3, 2], bytes(24), None),
        ([3, 2], bytes(23), "must have 24 bytes (got 23)"),
        ([0, 2], b"", "must be [-1, 2], -1 being 1 to 8 (got [0, 2])"),
        ([2**62, 2], bytes(8), "must be [-1, 2], -1 being 1 to 8 (got [4611686018427387904, 2])"),
    ):
        request = new_request("other")
        request.inputs.add(name="ids", datatype="INT32", shape=shape)
        request.raw_input_contents.append(raw)
        if message is None:
            check_request(request)
        else:
            with pytest.raises(InvalidRequestError, match=re.escape(message)):
                check_request(request)
    check_request(new_request("other"))  # it is optional


@given(st.binary(max_size=60))
def test_any_bytes_are_counted_or_refused(raw: bytes) -> None:
    """Equal to reading them one by one."""
    elements, rest = 0, raw
    while len(rest) >= 4 and len(rest) - 4 >= struct.unpack("<I", rest[:4])[0]:
        rest = rest[4 + struct.unpack("<I", rest[:4])[0] :]
        elements += 1
    assert checks._count_elements(raw) == (None if rest else elements)


@given(st.binary(max_size=100))
def test_any_message_that_parses_is_checked(data: bytes) -> None:
    request = service_pb2.ModelInferRequest()
    try:
        request.ParseFromString(b"\n\x0corchestrator" + data)
    except Exception:
        return
    try:
        check_request(request)
    except ApiError as error:
        assert len(error.message) < 600
