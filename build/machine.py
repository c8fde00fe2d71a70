"""Is this the machine that a GPU target is built on? An engine runs only on the GPU and versions that built it."""

from __future__ import annotations

from importlib import metadata

from build.errors import BuildError
from build.gpu_rows import Container, Gpu
from orchestrator.doctor.machine import ThisMachine


def check_machine(gpu: Gpu, container: Container) -> None:
    """Raise `BuildError` naming the first difference: GPU, SM, memory, number of GPUs, TensorRT-LLM, TensorRT."""
    fix = f"run the build on a machine with {gpu.count} x {gpu.name}, inside {container.image}"
    devices = ThisMachine().gpus()
    if not devices:
        raise BuildError(f"no NVIDIA GPU found here (nvidia-smi names none); {fix}; --dry-run needs none")
    if len(devices) < gpu.count:
        raise BuildError(f"gpu.count is {gpu.count}; this machine has {len(devices)}; {fix}")
    for number, facts in enumerate(devices[: gpu.count]):
        for key, found, wanted in (("name", facts.name, gpu.name), ("sm", facts.sm, gpu.sm)):
            if found != wanted:
                raise BuildError(f"gpu.{key} is {wanted!r}; GPU {number} here says {found!r}; {fix}")
        if facts.memory_mib is None:
            raise BuildError(
                f"gpu.memory_mib is {gpu.memory_mib}; nvidia-smi does not tell that of GPU {number}; {fix}"
            )
        if facts.memory_mib < gpu.memory_mib:
            raise BuildError(f"gpu.memory_mib is {gpu.memory_mib}; GPU {number} here has {facts.memory_mib:.0f}; {fix}")
    for package, version in (("tensorrt_llm", container.tensorrt_llm), ("tensorrt", container.tensorrt)):
        try:
            found = metadata.version(package)
        except metadata.PackageNotFoundError:
            raise BuildError(f"package {package} is not installed here; {fix}") from None
        if found != version:
            raise BuildError(f"container.{package} is {version}; installed here is {found}; {fix}")
