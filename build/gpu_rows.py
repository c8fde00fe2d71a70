"""The hardware and the container of a GPU target, as rows of data. `build.rows` reads them."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from build.model_rows import Count
from orchestrator.config import Row

Version = Annotated[str, Field(pattern=r"^[0-9]+(\.[0-9]+)+$")]
Rate = Annotated[float, Field(gt=0)]


class Gpu(Row):
    """The GPUs of one machine, all alike. `name` and `memory_mib` as `nvidia-smi` says them, `sm` as "8.9".

    The peaks are of dense matrices, in 10^12 operations a second; `fp8` is missing where the tensor cores have none.
    `interconnect_gb_per_s` is of one GPU, both directions. The price is what one GPU costs for an hour, an example.
    """

    name: str
    sm: Annotated[str, Field(pattern=r"^[0-9]+\.[0-9]$")]
    count: Count
    memory_mib: Count
    memory_gb_per_s: Rate
    fp16_tflops: Rate
    int8_tops: Rate
    fp8_tflops: Rate | None = None
    interconnect: Literal["nvlink", "pcie"]
    interconnect_gb_per_s: Rate
    price_per_hour: Annotated[float, Field(ge=0)]

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
