"""Optimisation profiles of a TensorRT plan: which shapes it takes, and for which its kernels are chosen.

A profile is a range of shapes for each input. Requests come batched by Triton (up to `max_batch_size`), in the sizes
that our side pads to, so both are taken from there:

    engine                  size of `profile_sizes`    a profile begins
    encoder, complexity     tokens                     after the one before: 1, then its size + 1
    ocr_recognizer          width of a line            at the next width after the one before
    ocr_detector            the longer side            at the smallest image, since the other side may be short

Triton takes the profile whose optimal shape is nearest.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from build.engine_rows import PlanParameters
from build.model_rows import AnyModelRow, ComplexityRow, EmbedderRow
from build.rows import TritonModel
from orchestrator.contracts import (
    ATTENTION_MASK,
    CERTAINTIES,
    CHARACTERS,
    CROP,
    EMBEDDING,
    EMBEDDING_INPUT_IDS,
    PIXELS,
    PROBABILITIES,
    TEXT_MAP,
    TensorSpec,
)
from orchestrator.embedding.window import BUCKETS
from orchestrator.vision.sizes import CROP_WIDTHS, SIDES

Shape = tuple[int, ...]
# The tensors of each engine, as config.pbtxt declares them.
INPUTS: dict[str, tuple[TensorSpec, ...]] = {
    "encoder": (EMBEDDING_INPUT_IDS, ATTENTION_MASK),
    "complexity": (EMBEDDING_INPUT_IDS, ATTENTION_MASK),
    "ocr_detector": (PIXELS,),
    "ocr_recognizer": (CROP,),
}
OUTPUTS: dict[str, tuple[TensorSpec, ...]] = {
    "encoder": (EMBEDDING,),
    "complexity": (PROBABILITIES,),
    "ocr_detector": (TEXT_MAP,),
    "ocr_recognizer": (CHARACTERS, CERTAINTIES),
}


class Shapes(NamedTuple):
    """One input in one profile, the batch included."""

    min: Shape
    opt: Shape
    max: Shape


Profile = Mapping[str, Shapes]


def sizes_of(engine: str, model: AnyModelRow) -> tuple[int, ...]:
    """The sizes that requests are padded to, from small to large; texts may have any number of tokens below."""
    if isinstance(model, (EmbedderRow, ComplexityRow)):
        return (*(size for size in BUCKETS if size < model.max_input_tokens), model.max_input_tokens)
    return SIDES if engine == "ocr_detector" else CROP_WIDTHS


def make_profiles(engine: str, settings: TritonModel, parameters: PlanParameters, model: AnyModelRow) -> list[Profile]:
    """The profiles of a row that `find_size_fault` has nothing against."""
    sizes = sizes_of(engine, model)
    opt, most = parameters.opt_batch_size, settings.max_batch_size
    profiles: list[Profile] = []
    for first, last in _ranges(engine, sizes, parameters.profile_sizes):
        shapes = {}
        for tensor in INPUTS[engine]:
            small, large = _fill(tensor, first), _fill(tensor, last)
            shapes[tensor.name] = Shapes((1, *small), (opt, *large), (most, *large))
        profiles.append(shapes)
    return profiles


def _fill(tensor: TensorSpec, size: int) -> Shape:
    return tuple(size if dim == -1 else dim for dim in tensor.dims)


def _ranges(engine: str, sizes: Sequence[int], lasts: Sequence[int]) -> Iterator[tuple[int, int]]:
    """First and last size of each profile."""
    for before, last in zip((0, *lasts), lasts):
        if engine == "ocr_detector":
            yield sizes[0], last
        elif engine == "ocr_recognizer":
            yield next(size for size in sizes if size > before), last
        else:
            yield before + 1, last


def find_size_fault(engine: str, parameters: PlanParameters, model: AnyModelRow) -> str | None:
    """What is wrong with `profile_sizes`: requests would fit no profile, or a profile had none. None if nothing."""
    sizes, given = sizes_of(engine, model), parameters.profile_sizes
    allowed = ", ".join(map(str, sizes))
    if given != sorted(set(given)) or not set(given) <= set(sizes):
        return f"parameters.profile_sizes is {given}; allowed, from small to large: {allowed}"
    if given[-1] != sizes[-1]:
        return (
            f"parameters.profile_sizes ends with {given[-1]}; requests have up to {sizes[-1]}, which must be the last; "
            f"allowed before it: {allowed}"
        )
    return None
