"""Is this the machine that a GPU target is built on? An engine runs only on the GPU and versions that built it."""

from __future__ import annotations

import subprocess
from importlib import metadata

from build.errors import BuildError
from build.gpu_rows import Container, Gpu

QUERY = ("nvidia-smi", "--query-gpu=name,compute_cap,memory.total", "--format=csv,noheader,nounits")


def check_machine(gpu: Gpu, container: Container) -> None:
    """Raise `BuildError` naming the first difference: GPU, SM, memory, number of GPUs, TensorRT-LLM, TensorRT."""
    fix = f"run the build on a machine with {gpu.count} x {gpu.name}, inside {container.image}"
    try:
        done = subprocess.run(QUERY, capture_output=True, text=True, check=True, timeout=60)
    except (OSError, subprocess.SubprocessError) as error:
        raise BuildError(f"no NVIDIA GPU found here (nvidia-smi: {error}); {fix}; --dry-run needs none") from error
    devices = [[part.strip() for part in line.split(",")] for line in done.stdout.splitlines() if line.strip()]
    if len(devices) < gpu.count:
        raise BuildError(f"gpu.count is {gpu.count}; this machine has {len(devices)}; {fix}")
    for number, (name, sm, memory) in enumerate(devices[: gpu.count]):
        for key, found, wanted in (("name", name, gpu.name), ("sm", sm, gpu.sm)):
            if found != wanted:
                raise BuildError(f"gpu.{key} is {wanted!r}; GPU {number} here says {found!r}; {fix}")
        if float(memory) < gpu.memory_mib:
            raise BuildError(f"gpu.memory_mib is {gpu.memory_mib}; GPU {number} here has {memory}; {fix}")
    for package, version in (("tensorrt_llm", container.tensorrt_llm), ("tensorrt", container.tensorrt)):
        try:
            found = metadata.version(package)
        except metadata.PackageNotFoundError:
            raise BuildError(f"package {package} is not installed here; {fix}") from None
        if found != version:
            raise BuildError(f"container.{package} is {version}; installed here is {found}; {fix}")
