"""What each engine needs on disk, as steps. A new engine is a new entry in `RECIPES`."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from build import plan_commands, trtllm
from build.bert_onnx import write_bert_onnx
from build.blockwise import quantize_blockwise
from build.checkpoint_tokenizer import copy_tokenizer
from build.complexity_onnx import quantize, write_complexity_onnx
from build.e5_file import read_e5
from build.engine_rows import (
    AdapterRow,
    AnyParameters,
    ComplexityParameters,
    EncoderParameters,
    OnnxParameters,
    PlanParameters,
    TensorRTLLMParameters,
)
from build.fetch import cached_path, fetch
from build.gguf_checkpoint import write_checkpoint
from build.gpu_rows import Container, Gpu
from build.lora import write_lora
from build.model_rows import AnyModelRow, ComplexityRow, EmbedderRow, ModelRow, OcrRow, PackagedFile
from build.ocr_onnx import write_alphabet, write_detector_onnx, write_recognizer_onnx
from build.openvino_ir import write_openvino_ir
from build.products import Product
from build.router_adapter import read_adapter
from build.rows import TargetRow, TritonModel
from build.tensorrt_plan import DESCRIPTION
from build.tensorrt_plan import PLAN as PLAN_FILE
from build.tokenizer import write_tokenizer, write_word_pieces
from build.unigram_tokenizer import write_unigram


@dataclass(frozen=True)
class Job:
    """One model on its way into the Triton model `name` of `target`; `folder` is that one's version folder.

    `models` are the target's model rows by name.
    """

    name: str
    target: TargetRow
    models: Mapping[str, AnyModelRow]
    folder: Path
    cache: Path

    @property
    def settings(self) -> TritonModel:
        return self.target.models[self.name]

    @property
    def model(self) -> AnyModelRow:
        return self.models[self.settings.model or ""]

    @property
    def llm(self) -> ModelRow:
        assert isinstance(self.model, ModelRow)
        return self.model

    @property
    def embedder(self) -> EmbedderRow:
        assert isinstance(self.model, EmbedderRow)
        return self.model

    @property
    def classifier(self) -> ComplexityRow:
        assert isinstance(self.model, ComplexityRow)
        return self.model

    @property
    def reader(self) -> OcrRow:
        assert isinstance(self.model, OcrRow)
        return self.model

    @property
    def gguf(self) -> Path:
        return cached_path(_first(self.llm), self.cache)

    @property
    def trtllm(self) -> TensorRTLLMParameters:
        assert isinstance(self.settings.parameters, TensorRTLLMParameters)
        return self.settings.parameters

    @property
    def plan(self) -> PlanParameters:
        assert isinstance(self.settings.parameters, PlanParameters)
        return self.settings.parameters

    @property
    def graph(self) -> PlanParameters | OnnxParameters:
        assert isinstance(self.settings.parameters, (PlanParameters, OnnxParameters))
        return self.settings.parameters

    @property
    def gpu(self) -> Gpu:
        assert self.target.gpu is not None
        return self.target.gpu

    @property
    def container(self) -> Container:
        assert self.target.container is not None
        return self.target.container


class Step(NamedTuple):
    """A line of progress and what it does: `run` fills the job's folder or cache, or raises `BuildError`.

    `product` is what a step makes that is a command of the target's container; None when the job needs none.
    """

    name: str
    run: Callable[[Job], None]
    product: Callable[[Job], Product | None] | None = None


class Recipe(NamedTuple):
    """The steps of one engine, and the packages whose versions decide their result."""

    steps: tuple[Step, ...]
    tools: tuple[str, ...]


def fetch_weights(job: Job) -> None:
    """The model's files into the cache."""
    fetch(_first(job.model), job.cache, *job.model.sources[1:])


def _first(model: AnyModelRow) -> PackagedFile:
    assert model.sources  # `build.pairs` refused the others
    return model.sources[0]


def convert_tokenizer(job: Job) -> None:
    """`tokenizer/`: tokenizer.json, chat_template.jinja and the configurations other tools want."""
    write_tokenizer(job.gguf, job.llm, job.folder / "tokenizer")


def convert_weights(job: Job) -> None:
    """`openvino/`: the IR of model, tokenizer and detokenizer."""
    write_openvino_ir(job.gguf, job.folder / "openvino")


def copy_word_pieces(job: Job) -> None:
    """`tokenizer.json`, of an embedder."""
    write_word_pieces(fetch(job.embedder.tokenizer, job.cache), job.embedder, job.folder / "tokenizer.json")


def export_onnx(job: Job) -> None:
    """`model.onnx`: the embedder's graph, pooling and norm inside."""
    path = job.folder / "model.onnx"
    write_bert_onnx(fetch(job.embedder.weights, job.cache), job.embedder, path)
    parameters = job.settings.parameters
    if isinstance(parameters, EncoderParameters) and parameters.precision == "int8_blockwise":
        quantize_blockwise(path)


def convert_pieces(job: Job) -> None:
    """`tokenizer.json`, of the classifier."""
    write_unigram(read_e5(fetch(job.classifier.weights, job.cache)).pieces, job.folder / "tokenizer.json")


def export_classifier(job: Job) -> None:
    """`model.onnx`: the classifier's graph, adapter, pooling, head and softmax inside."""
    file = read_e5(fetch(job.classifier.weights, job.cache))
    path = job.folder / "model.onnx"
    write_complexity_onnx(file, read_adapter(), job.classifier, path)
    parameters = job.settings.parameters
    if isinstance(parameters, ComplexityParameters) and parameters.precision == "int8":
        quantize(path)


def change_detector(job: Job) -> None:
    """`model.onnx`: PP-OCR's detector, which takes bytes."""
    write_detector_onnx(fetch(job.reader.detector, job.cache), job.folder / "model.onnx")


def change_recognizer(job: Job) -> None:
    """`model.onnx`: PP-OCR's recogniser, which takes bytes and tells the most probable characters."""
    write_recognizer_onnx(fetch(job.reader.recognizer, job.cache), job.reader, job.folder / "model.onnx")


def copy_alphabet(job: Job) -> None:
    """`characters.txt`: what the recogniser's classes stand for."""
    write_alphabet(fetch(job.reader.recognizer, job.cache), job.reader, job.folder / "characters.txt")


def copy_files(job: Job) -> None:
    """The files of a speech model."""
    for source in job.model.sources:
        shutil.copyfile(fetch(source, job.cache), job.folder / source.file)


def checkpoint(job: Job) -> Product:
    """The model's own checkpoint."""
    assert job.llm.checkpoint is not None  # `build.pairs` refused the others
    return trtllm.fetch_checkpoint(job.llm.checkpoint)


def converted(job: Job) -> Product:
    """TensorRT-LLM's checkpoint of it."""
    return trtllm.convert(job.llm, job.trtllm, job.container)


def engine(job: Job) -> Product:
    """The engine."""
    return trtllm.build_engine(job.llm, job.settings, job.trtllm, job.gpu, job.container)


def engine_verified(job: Job) -> Product:
    """Its comparison with the original."""
    return trtllm.verify_engine(job.llm, job.settings, job.trtllm, job.gpu, job.container)


def graph(job: Job) -> Product:
    """The ONNX graph that a plan is made from, or that runs as it is."""
    return plan_commands.make_graph(job.graph.engine, job.graph, job.model)


def plan(job: Job) -> Product:
    """The TensorRT plan."""
    return plan_commands.build_plan(job.name, job.settings, job.plan, job.model, job.gpu, job.container)


def plan_verified(job: Job) -> Product:
    """Its comparison with ONNX Runtime."""
    return plan_commands.verify_plan(job.name, job.settings, job.plan, job.model, job.gpu, job.container)


def install_plan(job: Job) -> None:
    """`model.plan`, and `plan.json`, which says what it takes."""
    for name in (PLAN_FILE, DESCRIPTION):
        shutil.copyfile(plan(job).path(job.cache) / name, job.folder / name)


def install_graph(job: Job) -> None:
    """`model.onnx`, in the row's precision."""
    shutil.copyfile(graph(job).path(job.cache) / plan_commands.GRAPH, job.folder / plan_commands.ONNX)


def llmapi_model(job: Job) -> Product:
    """NVIDIA's model.py for the PyTorch runtime."""
    return trtllm.copy_llmapi_model(job.container)


def draft(job: Job) -> Product | None:
    """The checkpoint that drafts for the PyTorch runtime."""
    return trtllm.drafts(job.trtllm, {name: row for name, row in job.models.items() if isinstance(row, ModelRow)})


def copy_checkpoint_tokenizer(job: Job) -> None:
    """`tokenizer/`, from the checkpoint."""
    copy_tokenizer(checkpoint(job).path(job.cache), job.llm, job.folder / "tokenizer")


def install_engine(job: Job) -> None:
    """`engine/`: a copy, for what happens to an artifact must not reach the cache."""
    source = engine(job).path(job.cache)
    trtllm.check_engine(source, job.settings, job.trtllm, job.container)
    shutil.copytree(source, job.folder / "engine")


def install_llmapi(job: Job) -> None:
    """NVIDIA's `model.py` and `helpers.py`, `checkpoint/`, and `draft/` where there is one."""
    for name in ("model.py", "helpers.py"):
        shutil.copyfile(llmapi_model(job).path(job.cache) / name, job.folder / name)
    for name, product in (("checkpoint", checkpoint(job)), ("draft", draft(job))):
        if product is not None:
            # Not the downloader's own notes.
            shutil.copytree(product.path(job.cache), job.folder / name, ignore=shutil.ignore_patterns(".*"))


def vllm_checkpoint(job: Job) -> Product | None:
    """The checkpoint of a model that has no GGUF."""
    return None if job.llm.gguf is not None else checkpoint(job)


def fetch_gguf(job: Job) -> None:
    """The GGUF of a model that has one, into the cache."""
    if job.llm.gguf is not None:
        fetch(job.llm.gguf, job.cache)


def install_vllm(job: Job) -> None:
    """`checkpoint/` and `tokenizer/`, out of the GGUF, or the downloaded ones."""
    product = vllm_checkpoint(job)
    if product is None:
        write_tokenizer(job.gguf, job.llm, job.folder / "tokenizer")
        write_checkpoint(job.gguf, job.llm, job.folder / "checkpoint")
        return
    source = product.path(job.cache)
    copy_tokenizer(source, job.llm, job.folder / "tokenizer")
    # Not the downloader's own notes.
    shutil.copytree(source, job.folder / "checkpoint", ignore=shutil.ignore_patterns(".*"))


def install_adapters(job: Job) -> None:
    """`lora/<name>/`: the two tensors of each adapter."""
    for adapter in job.trtllm.adapters:
        source = trtllm.fetch_adapter(adapter).path(job.cache)
        rank = job.trtllm.max_lora_rank or 0
        write_lora(source, job.llm.architecture, rank, job.folder / "lora" / adapter.name)


def _command(name: str, product: Callable[[Job], Product | None]) -> Step:
    """A step that makes a product."""

    def run(job: Job) -> None:
        if (made := product(job)) is not None:
            made.make(job.cache)

    return Step(name, run, product)


FETCH = Step("fetch weights", fetch_weights)
TOKENIZER = Step("convert tokenizer", convert_tokenizer)
OPENVINO_IR = Step("convert weights to OpenVINO IR", convert_weights)
WORD_PIECES = Step("copy tokenizer", copy_word_pieces)
ONNX = Step("export weights to ONNX", export_onnx)
PIECES = Step("convert tokenizer", convert_pieces)
CLASSIFIER = Step("export classifier to ONNX", export_classifier)
FILES = Step("copy files", copy_files)

RECIPES: dict[str, Recipe] = {
    "openvino": Recipe(
        steps=(FETCH, TOKENIZER, OPENVINO_IR),
        tools=("gguf", "tokenizers", "openvino", "openvino-genai", "openvino-tokenizers"),
    ),
    # It answers through a real tokenizer, so that everything around an engine is exercised.
    "scripted": Recipe(steps=(FETCH, TOKENIZER), tools=("gguf", "tokenizers")),
    "wordpiece": Recipe(steps=(FETCH, WORD_PIECES), tools=("tokenizers",)),
    "complexity": Recipe(
        steps=(FETCH, PIECES, CLASSIFIER), tools=("numpy", "onnx", "onnxruntime", "safetensors", "tokenizers")
    ),
    "encoder": Recipe(steps=(FETCH, ONNX), tools=("numpy", "onnx", "safetensors")),
    "ocr_detector": Recipe(steps=(FETCH, Step("change graph", change_detector)), tools=("onnx",)),
    "ocr_recognizer": Recipe(steps=(FETCH, Step("change graph", change_recognizer)), tools=("onnx",)),
    "ocr": Recipe(steps=(FETCH, Step("copy alphabet", copy_alphabet)), tools=("onnx",)),
    # What runs them need not be there to copy them; a model that cannot be loaded is better refused now.
    "vad": Recipe(steps=(FETCH, FILES), tools=("onnxruntime",)),
    "stt": Recipe(steps=(FETCH, FILES), tools=("faster-whisper", "soundfile", "soxr")),
    "turn": Recipe(steps=(FETCH, FILES), tools=("onnxruntime",)),
    "tts": Recipe(steps=(FETCH, FILES), tools=("piper-tts",)),
}

# Runtime "llmapi" of engine "tensorrt_llm" is made differently, and so is runtime "tensorrt" of those with a graph.
LLMAPI = "tensorrt_llm_llmapi"
PLAN, CLASSIFIER_PLAN, GRAPH, CLASSIFIER_GRAPH = "plan", "complexity_plan", "graph", "complexity_graph"
# Packages of the container.
CONTAINER_TOOLS = ("tensorrt", "tensorrt_llm")
RECIPES["tensorrt_llm"] = Recipe(
    steps=(
        _command("fetch checkpoint", checkpoint),
        _command("convert weights for TensorRT-LLM", converted),
        _command("build engine", engine),
        _command("compare with the original", engine_verified),
        Step("copy tokenizer", copy_checkpoint_tokenizer),
        Step("install engine", install_engine),
    ),
    tools=CONTAINER_TOOLS,
)
RECIPES[LLMAPI] = Recipe(
    steps=(
        _command("fetch checkpoint", checkpoint),
        _command("fetch draft", draft),
        _command("copy NVIDIA's model", llmapi_model),
        Step("copy tokenizer", copy_checkpoint_tokenizer),
        Step("install checkpoint", install_llmapi),
    ),
    tools=CONTAINER_TOOLS,
)


RECIPES["vllm"] = Recipe(
    steps=(
        Step("fetch weights", fetch_gguf),
        _command("fetch checkpoint", vllm_checkpoint),
        Step("install checkpoint", install_vllm),
    ),
    tools=("gguf", "ml-dtypes", "numpy", "safetensors", "tokenizers"),
)
RECIPES[PLAN] = Recipe(
    steps=(
        _command("write graph", graph),
        _command("build plan", plan),
        _command("compare with ONNX Runtime", plan_verified),
        Step("install plan", install_plan),
    ),
    tools=("numpy", "onnx", "onnxruntime-gpu", "safetensors", "tensorrt"),
)
RECIPES[GRAPH] = Recipe(
    steps=(_command("write graph", graph), Step("install graph", install_graph)),
    tools=("numpy", "onnx", "safetensors"),
)
# The orchestrator reads conversations with its tokenizer.
for _its, _plain in ((CLASSIFIER_PLAN, RECIPES[PLAN]), (CLASSIFIER_GRAPH, RECIPES[GRAPH])):
    RECIPES[_its] = Recipe(steps=(FETCH, PIECES, *_plain.steps), tools=(*_plain.tools, "tokenizers"))


def recipe_of(parameters: AnyParameters) -> Recipe:
    """The recipe of an engine by its parameters."""
    if isinstance(parameters, PlanParameters):
        return RECIPES[CLASSIFIER_PLAN if parameters.engine == "complexity" else PLAN]
    if isinstance(parameters, OnnxParameters):
        return RECIPES[CLASSIFIER_GRAPH if parameters.engine == "complexity" else GRAPH]
    is_llmapi = isinstance(parameters, TensorRTLLMParameters) and parameters.runtime == "llmapi"
    return RECIPES[LLMAPI if is_llmapi else parameters.engine]


def make_job(name: str, target: TargetRow, models: Mapping[str, AnyModelRow], folder: Path, cache: Path) -> Job:
    """The job of the Triton model `name`, whose version folder will be below `folder`, a model repository."""
    return Job(name, target, models, folder / name / "1", cache)


def steps_of(job: Job) -> tuple[Step, ...]:
    """The steps of a job, in order."""
    parameters = job.settings.parameters
    assert parameters is not None
    steps = recipe_of(parameters).steps
    if not isinstance(parameters, TensorRTLLMParameters) or not parameters.adapters:
        return steps
    fetches = [_fetch_adapter(adapter) for adapter in parameters.adapters]
    return (*fetches, *steps, Step("install adapters", install_adapters))


def _fetch_adapter(adapter: AdapterRow) -> Step:
    return _command(f"fetch adapter {adapter.name}", lambda job: trtllm.fetch_adapter(adapter))


def find_products(job: Job) -> Iterator[tuple[Step, Product]]:
    """The steps of a job that are commands of the container, and what they make."""
    for step in steps_of(job):
        if step.product is not None and (product := step.product(job)) is not None:
            yield step, product


def read_verified(target: TargetRow, models: Mapping[str, AnyModelRow], cache: Path) -> dict[str, Any]:
    """What the comparisons of `target`'s engines and plans found, by Triton model; they have all been made."""
    found = {}
    for name in target.parts:
        job = make_job(name, target, models, Path("model_repository"), cache)
        for _, product in find_products(job):
            if plan_commands.VERIFIED in product.files:
                found[name] = json.loads((product.path(cache) / plan_commands.VERIFIED).read_bytes())
    return found
