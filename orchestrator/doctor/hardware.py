"""The machine against what an artifact of a GPU target was built for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from orchestrator.doctor.engines import needed_bytes
from orchestrator.doctor.findings import Finding
from orchestrator.doctor.machine import GpuFacts, Machine
from orchestrator.manifest import Container, Gpu, Manifest

MIB = 2**20
# NVIDIA's documentation starts its container with --shm-size=2g for tensor parallelism.
SHARED_MEMORY_BYTES = 2 << 30
# NVIDIA's image has the backends `tensorrtllm` and `python` alone; ours is that one with the others added.
OUR_IMAGE = "docker build -f deploy/Dockerfile --target gpu -t triton-realtime:gpu . and run it in that image"
SHARED_MEMORY_CHECK, GPU, SOFTWARE, BACKEND, MEMORY = "shm", "gpu", "software", "backend", "memory"


def check_hardware(root: Path, manifest: Manifest, machine: Machine, programs: Sequence[str]) -> Iterator[Finding]:
    """GPUs, driver, versions, memory, shared memory; nothing for a target without GPUs."""
    gpu, container = manifest.row.gpu, manifest.row.container
    if gpu is None or container is None:
        return
    gpus = machine.gpus()
    yield from _check_gpus(manifest, gpu, container, gpus)
    yield from _check_software(manifest, container, machine, programs)
    yield from _check_memory(root, manifest, gpus)
    if any(engine.parameters.world_size > 1 for engine in manifest.trtllm_engines):
        size = machine.shared_memory_bytes()
        enough = size >= SHARED_MEMORY_BYTES
        yield Finding(
            SHARED_MEMORY_CHECK,
            f"/dev/shm has {size / 2**30:.1f} GiB",
            "" if enough else "2 GiB for engines of several GPUs",
            "" if enough else "docker run --shm-size=2g, or --ipc=host",
            may_start=True,
        )


def _check_gpus(manifest: Manifest, gpu: Gpu, container: Container, gpus: Sequence[GpuFacts]) -> Iterator[Finding]:
    machine = f"a machine with {gpu.count} x {gpu.name}"
    if not gpus:
        yield Finding(
            GPU,
            "no NVIDIA GPU (nvidia-smi finds none)",
            machine,
            f"docker run --gpus all {container.image} there; without a GPU: python -m build --target cpu",
        )
        return
    engines = manifest.trtllm_engines
    for engine in engines:
        last = max(engine.parameters.gpu_device_ids, default=0)
        if last >= len(gpus):
            parameters = engine.parameters
            yield Finding(
                GPU,
                f"{engine.name} (tp_size {parameters.tp_size}, gpu_device_ids {parameters.gpu_device_ids}): "
                f"{len(gpus)} GPUs here",
                f"{last + 1}",
                f"{machine}, or a smaller tp_size in the row, then {manifest.rebuild}",
            )
    placed = [each.parameters for each in engines] + [each.parameters for each in manifest.graphs]
    used = sorted({device for parameters in placed for device in parameters.gpu_device_ids})
    for number in used:
        if number >= len(gpus):
            continue
        facts = gpus[number]
        # An engine loads only on the SM that built it, and is tuned for one GPU.
        other = f"python -m build --target X on this GPU, or {machine}"
        if facts.sm != gpu.sm:
            yield Finding(GPU, f"GPU {number}: {facts.name}, SM {facts.sm}", f"SM {gpu.sm}, the engines'", other)
        elif facts.name != gpu.name:
            yield Finding(GPU, f"GPU {number}: {facts.name}", f"{gpu.name}, whose kernels were timed", other)
        elif facts.memory_mib is None:
            yield Finding(
                GPU,
                f"GPU {number}: {facts.name}, of whose memory nvidia-smi does not tell",
                f"{gpu.memory_mib} MiB",
                "on the host: nvidia-smi --query-gpu=memory.total --format=csv; of a MIG slice: nvidia-smi -L",
                may_start=True,
            )
        elif facts.memory_mib < gpu.memory_mib:
            yield Finding(GPU, f"GPU {number}: {facts.memory_mib:.0f} MiB", f"{gpu.memory_mib} MiB", other)
        else:
            yield Finding(GPU, f"GPU {number}: {facts.name}, SM {facts.sm}")
    driver = gpus[0].driver
    if _as_numbers(driver) < _as_numbers(container.driver):
        yield Finding(
            GPU,
            f"driver {driver}",
            f"{container.driver} or later, for {container.image}",
            "on the host: apt-get install cuda-drivers (from NVIDIA's repository), and start it again",
        )
    else:
        yield Finding(GPU, f"driver {driver}")


def _check_software(
    manifest: Manifest, container: Container, machine: Machine, programs: Sequence[str]
) -> Iterator[Finding]:
    image = f"docker run --gpus all {container.image}"
    for package, wanted in (("tensorrt_llm", container.tensorrt_llm), ("tensorrt", container.tensorrt)):
        found = machine.version(package)
        if found == wanted:
            yield Finding(SOFTWARE, f"{package} {found}")
        else:
            yield Finding(
                SOFTWARE,
                f"{package} {found or 'is not installed'}",
                f"{wanted}, which built the engines",
                f"{image}; or {manifest.rebuild} here",
            )
    for program in programs:
        if not machine.has_program(program):
            yield Finding(SOFTWARE, f"{program} is not in PATH", "what starts engines of several GPUs", image)


def _check_memory(root: Path, manifest: Manifest, gpus: Sequence[GpuFacts]) -> Iterator[Finding]:
    needed: dict[int, int] = {}
    for engine in manifest.trtllm_engines:
        for device in engine.parameters.gpu_device_ids:
            needed[device] = needed.get(device, 0) + needed_bytes(root, manifest, engine)
    for plan in manifest.graphs:
        for device in plan.parameters.gpu_device_ids:
            size = plan.settings.instance_count * plan.parameters.memory_mib * MIB
            needed[device] = needed.get(device, 0) + size
    for device, size in sorted(needed.items()):
        if device >= len(gpus) or (free_mib := gpus[device].free_mib) is None:
            continue
        free = free_mib * MIB
        if size > free:
            yield Finding(
                MEMORY,
                f"GPU {device}: {free / 2**30:.1f} GiB free",
                f"{size / 2**30:.1f} GiB of weights, KV cache and plans",
                "end what else runs on it (nvidia-smi); or lower kv_cache_share in the row, then " + manifest.rebuild,
            )
        else:
            yield Finding(MEMORY, f"GPU {device}: {size / 2**30:.1f} GiB needed, {free / 2**30:.1f} free")


def check_backends(manifest: Manifest, machine: Machine, backends: Mapping[str, Path]) -> Iterator[Finding]:
    """Every backend that a model names: there, and linked with libraries that are there. `backends` are folders."""
    fix = "pip install -c constraints.txt -e '.[cpu]'" if manifest.row.container is None else OUR_IMAGE
    for name in sorted({model.backend for model in manifest.row.models.values()}):
        folder = backends.get(name)
        library = None if folder is None else folder / f"libtriton_{name}.so"
        if folder is None or library is None or not (library.is_file() or (folder / "model.py").is_file()):
            yield Finding(
                BACKEND, f"{name}: Triton has no such backend", "a folder of backends", f"{fix}, or --backend-directory"
            )
        elif library.is_file() and (missing := machine.missing_libraries(library)):
            yield Finding(BACKEND, f"{library}: {', '.join(missing)} not found", "all libraries it is linked with", fix)
        else:
            yield Finding(BACKEND, name)


def _as_numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".") if part.isdecimal())
