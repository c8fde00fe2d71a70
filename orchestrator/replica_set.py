"""Which Tritons there are: `serve` says it in a file, gateway and gRPC front follow it."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from orchestrator.config import ConfigError
from orchestrator.files import write_whole
from orchestrator.row_faults import describe

REPLICAS_FILE = "replicas.json"
# How often the file is looked at: who changed it knows after a few times this long that it was seen.
FOLLOW_PERIOD_S = 0.25

# What one Triton alone is called; several are "triton-0", "triton-1", ...
ALONE = "triton"

State = Literal["serving", "leaving", "down"]


class _Part(BaseModel):
    """Base of every part: frozen, unknown keys are errors."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Address(_Part):
    """One Triton. `name` is the replica's, which stays when another process takes its place.

    "leaving" finishes what it has and is asked nothing new; "down" is being started again.
    """

    name: str
    grpc_url: str  # host:port
    metrics_url: str
    state: State = "serving"
    num_restarts: int = 0


class ReplicaSet(_Part):
    """`version` counts the changes of what is served: with another one the artifact has to be read again."""

    artifact: Path
    version: int = 0
    replicas: tuple[Address, ...]

    @classmethod
    def read(cls, path: Path) -> ReplicaSet:
        """Raises `ConfigError` for a file that is none, `OSError`."""
        try:
            return cls.model_validate_json(path.read_bytes())
        except ValidationError as error:
            raise ConfigError("\n".join(f"{path}: {line}" for line in describe(error))) from error

    def write(self, path: Path) -> None:
        """As a whole, so that nobody reads a part of it."""
        write_whole(path, self.model_dump_json(indent=2) + "\n")


def find_replicas(path: Path | None, artifact: Path, grpc_url: str, metrics_url: str = "") -> ReplicaSet:
    """Those of the file, or one of `artifact` without a file; raises as `ReplicaSet.read`."""
    if path is not None:
        return ReplicaSet.read(path)
    return ReplicaSet(artifact=artifact, replicas=(Address(name=ALONE, grpc_url=grpc_url, metrics_url=metrics_url),))
