"""manifest.json of an artifact: its files and, of the target's row, what who starts and checks it must know.

`python -m build` writes it. Keys that nobody here reads are passed over: they record how the artifact was made.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from orchestrator.config import ConfigError
from orchestrator.row_faults import describe

MANIFEST = "manifest.json"
MODEL_REPOSITORY = "model_repository"


class _Part(BaseModel):
    """Base of every part: frozen."""

    model_config = ConfigDict(frozen=True)


class File(_Part):
    """One file as it was built."""

    sha256: str
    bytes: int


class Gpu(_Part):
    """The GPUs the artifact was built for, all alike; `name` and `memory_mib` as `nvidia-smi` says them."""

    name: str
    sm: str
    count: int
    memory_mib: int


class Container(_Part):
    """The image it was built in. `driver` is the first one that the image is supported on."""

    image: str
    tensorrt_llm: str
    tensorrt: str
    driver: str


class Parameters(_Part):
    """Of an engine's parameters, what says where it runs and how much memory it takes.

    `runtime` is that of engine `tensorrt_llm`, or of what has an ONNX graph; the numbers that follow it are of engine
    `tensorrt_llm` alone, but for `gpu_device_ids` and `memory_mib`, what an instance may take there, of a plan
    and of a graph on GPUs.
    """

    engine: str
    runtime: Literal["engine", "llmapi", "onnxruntime", "onnxruntime_gpu", "tensorrt"] | None = None
    tp_size: int = 1
    pp_size: int = 1
    gpu_device_ids: list[int] = []
    memory_mib: int = 0
    max_input_len: int = 0
    max_seq_len: int = 0
    max_num_tokens: int = 0
    tokens_per_block: int = 0
    kv_cache_precision: str = "auto"
    speculation: Any = None

    @property
    def world_size(self) -> int:
        """GPUs of one instance."""
        return self.tp_size * self.pp_size

    @property
    def max_draft_len(self) -> int:
        """The most draft tokens of one request in one step: the builder makes room for them."""
        draft = self.speculation if isinstance(self.speculation, dict) else {}
        if draft.get("method") == "lookahead":  # of a window and branches, as TensorRT-LLM counts them
            width, ngram_size = draft["window_size"] - 1 + draft["verification_set_size"], draft["ngram_size"]
            return int(max(ngram_size - 2, 0) + width * (ngram_size - 1))
        return int(draft.get("max_draft_len", 0))


class TritonModel(_Part):
    """The settings of one Triton model."""

    backend: str
    max_batch_size: int
    instance_count: int
    model: str | None = None
    parameters: Parameters | None = None


class Row(_Part):
    """The target's row."""

    models: dict[str, TritonModel] = {}
    gpu: Gpu | None = None
    container: Container | None = None


class Architecture(_Part):
    """Of a model's numbers, those that size its KV cache; other families have no such numbers."""

    vocab_size: int
    num_layers: int = 0
    num_kv_heads: int = 0
    head_dim: int = 0


class ModelRow(_Part):
    """A model's row; what was not made for a language has no architecture in it."""

    architecture: Architecture | None = None


class TrtllmEngine(_Part):
    """A Triton model that runs TensorRT-LLM."""

    name: str
    settings: TritonModel
    parameters: Parameters


class Graph(_Part):
    """A Triton model that is an ONNX graph on GPUs: a TensorRT plan of it, or itself."""

    name: str
    settings: TritonModel
    parameters: Parameters


class Manifest(_Part):
    """The parts of manifest.json that matter after the build."""

    version: Literal[1] = Field(alias="schema")
    target: str
    files: dict[str, File]
    render_only: bool = False
    row: Row = Row()
    models: dict[str, ModelRow] = {}

    @property
    def trtllm_engines(self) -> list[TrtllmEngine]:
        """In the row's order."""
        return [
            TrtllmEngine(name=name, settings=model, parameters=model.parameters)
            for name, model in self.row.models.items()
            if model.parameters is not None and model.parameters.engine == "tensorrt_llm"
        ]

    @property
    def graphs(self) -> list[Graph]:
        """In the row's order."""
        return [
            Graph(name=name, settings=model, parameters=model.parameters)
            for name, model in self.row.models.items()
            if model.parameters is not None and model.parameters.runtime in ("tensorrt", "onnxruntime_gpu")
        ]

    def find_architecture(self, settings: TritonModel | None) -> Architecture | None:
        """The numbers of the model that a Triton model runs, if it runs one and that has such numbers."""
        row = None if settings is None else self.models.get(settings.model or "")
        return None if row is None else row.architecture

    @property
    def rebuild(self) -> str:
        """The command that makes the artifact anew."""
        return f"python -m build --target {self.target} --force"


def read_manifest(root: Path) -> Manifest:
    """The manifest of the artifact in `root`; raises `ConfigError` with a second line that says the fix."""
    path = root / MANIFEST
    try:
        return Manifest.model_validate_json(path.read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        # Where the build puts it a target's artifact has its name.
        target = root.name if root.parent.name == "artifacts" else "cpu"
        raise ConfigError(
            f"{root}: no finished artifact here ({MANIFEST} is missing)\nfix: python -m build --target {target}"
        ) from None
    except ValidationError as error:
        faults = "\n".join(f"{path}: {line}" for line in describe(error))
        raise ConfigError(f"{faults}\nfix: python -m build --target {root.name} --force") from None
