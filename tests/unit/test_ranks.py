"""How Triton is started for engines of several GPUs: the command lines that `serve` runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from gpu_targets import GPU_TARGETS

from build.rows import load_target
from orchestrator.manifest import Manifest
from orchestrator.triton.ranks import Ranks, choose_ranks, start_with
from orchestrator.triton.server import TritonLaunch

TRITON = TritonLaunch(
    (
        "tritonserver",
        "--model-repository=r",
        "--model-control-mode=none",
        "--disable-auto-complete-config",
        "--grpc-port=1",
        "--backend-config=python,shm-region-prefix-name=p-",
    ),
    {"PATH": "/bin"},
    Path("a"),
)


def manifest_of(target: str, **parameters: Any) -> Manifest:
    row = load_target(target).model_dump(mode="json")
    row["models"]["llm_large"]["parameters"] |= parameters
    return Manifest(schema=1, target=target, files={}, row=row)


def only_large(target: str, **parameters: Any) -> Manifest:
    row = load_target(target).model_dump(mode="json")
    del row["models"]["llm_small"]
    row["models"]["llm_large"]["parameters"] |= parameters
    return Manifest(schema=1, target=target, files={}, row=row)


def test_every_target_has_a_way() -> None:
    modes = {name: choose_ranks(manifest_of(name).trtllm_engines).mode for name in GPU_TARGETS}
    assert modes == {name: "orchestrator" if name == "h100" else "alone" for name in GPU_TARGETS}
    assert choose_ranks([]) == Ranks("alone")


def test_single_gpus_need_no_mpi() -> None:
    assert start_with(TRITON, choose_ranks(manifest_of("l4").trtllm_engines), "p-") == TRITON


def test_several_engines_run_under_nvidia_s_orchestrator() -> None:
    ranks = choose_ranks(manifest_of("h100").trtllm_engines)
    started = start_with(TRITON, ranks, "p-")
    assert started.command == (
        *("mpirun", "--allow-run-as-root", "-n", "1", *TRITON.command),
        *("--pinned-memory-pool-byte-size=0", "--enable-peer-access=false"),
        *("--cuda-memory-pool-byte-size=0:0", "--cuda-memory-pool-byte-size=1:0"),
    )
    assert started.env == {"PATH": "/bin", "TRTLLM_ORCHESTRATOR": "1", "TRTLLM_ORCHESTRATOR_SPAWN_PROCESSES": "1"}
    assert (started.folder, started.generations, ranks.programs) == (Path("a"), 2, ("mpirun",))


def test_one_engine_over_all_gpus_has_a_server_for_each() -> None:
    ranks = choose_ranks(only_large("h100").trtllm_engines)
    assert ranks == Ranks("leader", 2, "llm_large", (0, 1))
    started = start_with(TRITON, ranks, "p-")
    assert started.command == (
        *("mpirun", "--allow-run-as-root", "-n", "1", *TRITON.command),
        *(":", "-n", "1", "tritonserver", "--model-repository=r", "--model-control-mode=explicit"),
        *("--disable-auto-complete-config", "--grpc-port=1"),
        *("--backend-config=python,shm-region-prefix-name=p-1-", "--load-model=llm_large"),
    )
    assert started.env == TRITON.env


@pytest.mark.parametrize("tp_size", [1, 2])
def test_the_llm_api_starts_its_workers_itself(tp_size: int) -> None:
    ranks = choose_ranks(only_large("h100", runtime="llmapi", tp_size=tp_size).trtllm_engines)
    assert ranks.mode == "alone"
    assert start_with(TRITON, ranks, "p-").command == ("trtllm-llmapi-launch", *TRITON.command)
    assert ranks.programs == ("trtllm-llmapi-launch",)
