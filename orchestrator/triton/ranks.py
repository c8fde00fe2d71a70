"""How Triton is started for TensorRT-LLM's engines: alone, as NVIDIA's orchestrator, or a server for each GPU.

    alone         every engine has one instance on one GPU, or runs by the LLM API, which starts its workers itself
    orchestrator  engines of several GPUs or instances: one server, whose workers TensorRT-LLM starts by MPI
    leader        one engine over all GPUs, and no other: a server for each GPU, of which the first one serves

What each is started with is NVIDIA's launcher's (triton_backend/scripts/launch_triton_server.py of TensorRT-LLM 1.2:
`--multi-model` is the orchestrator, `--trtllm_llmapi_launch` what the LLM API needs). Leader is for a single engine,
since the other servers never return from loading the first one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from orchestrator.manifest import TrtllmEngine
from orchestrator.triton.server import TritonLaunch

MPIRUN = ("mpirun", "--allow-run-as-root")
LLMAPI_LAUNCH = "trtllm-llmapi-launch"
ORCHESTRATOR_ENV = {"TRTLLM_ORCHESTRATOR": "1", "TRTLLM_ORCHESTRATOR_SPAWN_PROCESSES": "1"}


class Ranks(NamedTuple):
    """How the servers of an artifact are started. `engine` is the leader's, `gpus` are those that the engines use."""

    mode: str  # "alone", "orchestrator" or "leader"
    world_size: int = 1
    engine: str = ""
    gpus: tuple[int, ...] = ()
    uses_llmapi: bool = False

    @property
    def programs(self) -> tuple[str, ...]:
        """What must be in PATH."""
        return (*(MPIRUN[:1] if self.mode != "alone" else ()), *((LLMAPI_LAUNCH,) if self.uses_llmapi else ()))


def choose_ranks(engines: Sequence[TrtllmEngine]) -> Ranks:
    """How to start Triton for `engines`; none at all is "alone"."""
    compiled = [each for each in engines if each.parameters.runtime == "engine"]
    gpus = tuple(sorted({device for each in compiled for device in each.parameters.gpu_device_ids}))
    uses_llmapi = len(compiled) < len(engines)
    spread = [each for each in compiled if each.parameters.world_size > 1 or each.settings.instance_count > 1]
    if not spread:
        return Ranks("alone", gpus=gpus, uses_llmapi=uses_llmapi)
    only = spread[0]
    if len(engines) == 1 and only.settings.instance_count == 1:
        return Ranks("leader", only.parameters.world_size, only.name, gpus)
    return Ranks("orchestrator", gpus=gpus, uses_llmapi=uses_llmapi)


def start_with(launched: TritonLaunch, ranks: Ranks, shm_prefix: str) -> TritonLaunch:
    """`launched`, one Triton by itself, as `ranks` says.

    Never log its command: it holds the keys. `shm_prefix` is what the first server was given; the others' begin with
    it.
    """
    command = launched.command
    if ranks.uses_llmapi:
        command = (LLMAPI_LAUNCH, *command)
    launched = replace(launched, generations=1 + len(ranks.programs))
    if ranks.mode == "alone":
        return replace(launched, command=command)
    if ranks.mode == "orchestrator":
        # The workers have the GPUs to themselves: Triton's own pools would take memory from their KV caches.
        pools = ["--pinned-memory-pool-byte-size=0", "--enable-peer-access=false"]
        pools += [f"--cuda-memory-pool-byte-size={device}:0" for device in ranks.gpus]
        env = {**launched.env, **ORCHESTRATOR_ENV}
        return replace(launched, command=(*MPIRUN, "-n", "1", *command, *pools), env=env)
    words = [*MPIRUN, "-n", "1", *command]
    for rank in range(1, ranks.world_size):
        words += [":", "-n", "1", *(_follow(word, rank, shm_prefix) for word in command)]
        words.append(f"--load-model={ranks.engine}")
    return replace(launched, command=tuple(words))


def _follow(word: str, rank: int, shm_prefix: str) -> str:
    """One word of the first server's command as the server of `rank` gets it, which loads the engine alone."""
    if word.startswith("--model-control-mode="):
        return "--model-control-mode=explicit"
    if word.startswith("--backend-config=python,shm-region-prefix-name="):
        return f"--backend-config=python,shm-region-prefix-name={shm_prefix}{rank}-"
    return word
