"""The hardware and the container of a GPU target, as rows of data. `build.rows` reads them."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from orchestrator.config import Row

Version = Annotated[str, Field(pattern=r"^[0-9]+(\.[0-9]+)+$")]
# A thousandth and a thousand times of what there is: beyond it is a slip of the pen, or of the unit.
Rate = Annotated[float, Field(ge=1, le=1e6)]
# FP8 tensor cores come with Ada, SM 8.9 (Model Optimizer's support matrix: FP8 and W4A8 are "Ada and later").
FIRST_FP8 = (8, 9)


class Gpu(Row):
    """The GPUs of one machine, all alike. `name` and `memory_mib` as `nvidia-smi` says them, `sm` as "8.9".

    The peaks are of dense matrices, in 10^12 operations a second; `fp8` is missing where the tensor cores have none.
    `interconnect_gb_per_s` is of one GPU, both directions. The price is what one GPU costs for an hour, an example.
    """

    name: str
    sm: Annotated[str, Field(pattern=r"^[0-9]+\.[0-9]$")]
    count: Annotated[int, Field(gt=0, le=64)]
    memory_mib: Annotated[int, Field(gt=0, le=2**24)]
    memory_gb_per_s: Rate
    fp16_tflops: Rate
    int8_tops: Rate
    fp8_tflops: Rate | None = None
    interconnect: Literal["nvlink", "pcie"]
    interconnect_gb_per_s: Rate
    price_per_hour: Annotated[float, Field(ge=0)]

    @model_validator(mode="after")
    def _peaks_are_whole(self) -> Gpu:
        if self.architecture >= FIRST_FP8 and self.fp8_tflops is None:
            raise ValueError(f"fp8_tflops is missing; sm {self.sm!r} computes in FP8, so its peak is required")
        return self

    @property
    def architecture(self) -> tuple[int, int]:
        """`sm` as numbers, to compare."""
        major, minor = self.sm.split(".")
        return int(major), int(minor)


class Container(Row):
    """The image that builds and serves: an engine runs only with the versions, and on the GPU, it was built with."""

    image: Annotated[str, Field(pattern=r"^[a-z0-9./-]+:[A-Za-z0-9._-]+$")]
    triton: Version
    tensorrt_llm: Version
    tensorrt: Version
    cuda: Version
    driver: Version


class VLLMImage(Row):
    """The image that serves engines `vllm`, and the version of vLLM in it. It builds nothing that others could not."""

    image: Annotated[str, Field(pattern=r"^[a-z0-9./-]+:[A-Za-z0-9._-]+$")]
    vllm: Version
