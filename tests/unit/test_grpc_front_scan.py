"""Counting a message's parts before it is parsed."""

from __future__ import annotations

import time
from typing import Any

import pytest
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st
from tritonclient.grpc import service_pb2

from orchestrator import contracts
from orchestrator.errors import InvalidRequestError
from orchestrator.grpc_front.scan import check_parts
from orchestrator.wire import add_string, new_request


def make() -> Any:
    request = new_request("orchestrator", "mine")
    request.model_version = "1"
    add_string(request, contracts.REQUEST, b"{}" * 1000)
    request.outputs.add(name="event")
    return request


def refusal(data: bytes) -> InvalidRequestError:
    with pytest.raises(InvalidRequestError) as got:
        check_parts(data)
    return got.value


def test_what_clients_send_passes_and_costs_little() -> None:
    data = make().SerializeToString()
    started_s = time.process_time()
    for _ in range(100):
        check_parts(data)
    assert time.process_time() - started_s < 0.1  # 1 ms each, and measured 20 us


@pytest.mark.parametrize(
    ("tag", "field"),
    [
        (0x22, "parameters: at most 32 are allowed"),
        (0x2A, "inputs: at most 16 are allowed"),
        (0x32, "outputs: at most 16 are allowed"),
        (0x3A, "raw_input_contents: at most 16 are allowed"),
        (0x0A, "model_name: at most 1 are allowed"),
    ],
)
def test_half_a_million_empty_parts_are_refused_at_once(tag: int, field: str) -> None:
    data = make().SerializeToString() + bytes((tag, 0)) * 520_000
    started_s = time.process_time()
    error = refusal(data)
    assert time.process_time() - started_s < 0.05
    assert error.message == field
    assert error.param == field.partition(":")[0]


def test_parts_inside_of_tensors_are_bounded_too() -> None:
    request = make()
    request.inputs[0].contents.bytes_contents.extend([b""] * 1000)
    assert refusal(request.SerializeToString()).message == "inputs[0].contents.bytes_contents: at most 64 are allowed"
    request = make()
    for number in range(40):
        request.outputs[0].parameters[str(number)].bool_param = True
    assert refusal(request.SerializeToString()).param == "outputs[0].parameters"


@pytest.mark.parametrize(
    "data",
    [
        b"\x42\x00",
        b"\x08\x01",
        b"\x0b\x0c",
        b"\x0a",
        b"\x0a\x05abc",
        b"\xff" * 20,
        b"\x0a" + b"\x80" * 12,
        b"\x2a\x02\x48\x00",
    ],
)
def test_what_is_no_message(data: bytes) -> None:
    assert refusal(data).status == 400


@given(st.binary(max_size=200))
def test_any_bytes_pass_or_are_refused(data: bytes) -> None:
    try:
        check_parts(data)
    except InvalidRequestError as error:
        assert len(error.message) < 200


PARTS = st.lists(
    st.sampled_from(
        [
            service_pb2.ModelInferRequest(
                inputs=[{"name": "a", "shape": [1, 2], "contents": {"fp32_contents": [1.5]}}]
            ),
            service_pb2.ModelInferRequest(inputs=[{"parameters": {"a": {"int64_param": 5}}}]),
            service_pb2.ModelInferRequest(outputs=[{"name": "b"}]),
            service_pb2.ModelInferRequest(raw_input_contents=[b"x" * 300]),
            service_pb2.ModelInferRequest(raw_input_contents=[b""]),
            service_pb2.ModelInferRequest(parameters={"c": {"string_param": "y"}}),
        ]
    ),
    max_size=60,
)
COUNTED = {"inputs": 16, "outputs": 16, "raw_input_contents": 16, "parameters": 32}


@given(parts=PARTS, cut=st.integers(0, 40))
def test_it_counts_as_protobuf_does(parts: list[Any], cut: int) -> None:
    """Messages one after the other are one message with the parts of all."""
    data = b"".join(part.SerializeToString() for part in parts)
    data = data[: len(data) - cut]
    try:
        request = service_pb2.ModelInferRequest.FromString(data)
    except DecodeError:
        refusal(data)
        return
    # A map holds a key once, however often it came.
    counts = {name: len(getattr(request, name)) for name in COUNTED if name != "parameters"}
    counts["parameters"] = sum(bool(part.parameters) for part in parts) if not cut else 0
    too_many = [name for name, limit in COUNTED.items() if counts[name] > limit]
    if too_many:
        assert refusal(data).param in too_many
    elif not cut:
        check_parts(data)
