"""`python -m build.verify_engine`: a TensorRT-LLM engine against its Hugging Face model, in the target's container.

The engine loads and continues a few fixed texts greedily. The original then reads each text with its continuation,
once, and says of every token how probable it was and which one was the most probable:

    token_agreement    the share of tokens that are the original's first choice at their place
    perplexity         of the engine's continuations under the original
    perplexity_best    of the original's own choices at the same places; the two are equal for an equal model

`verified.json` has the three; an engine that is too far off fails, and is not installed. The original needs its memory
(GPU and CPU together) after the engine's is free again.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from build.errors import BuildError

MAX_NEW_TOKENS = 48
TEXTS = (
    "The capital of France is",
    "Water boils at a temperature of",
    "In 1969, for the first time, a human being",
    "To sort a list of numbers in Python, you can",
    "def fibonacci(n):\n    ",
    "The three primary colours are",
    "Photosynthesis is the process by which",
    "Q: What is 17 times 6?\nA:",
    "Dear Sir or Madam,\n\nI am writing to",
    "Once upon a time, in a small village,",
    "La capitale de l'Allemagne est",
    "Der schnellste Weg, eine Sprache zu lernen,",
    '{"name": "Alice", "age": 30, "city":',
    "The main difference between TCP and UDP is",
    "Breaking news: scientists have discovered",
    "SELECT name, COUNT(*) FROM orders GROUP BY",
)
# Least agreement and largest perplexity ÷ perplexity_best. Assumptions by the bits of the weights: no engine was built.
LIMITS = {16: (0.97, 1.03), 8: (0.90, 1.15), 4: (0.80, 1.35)}
BITS = {"bf16": 16, "fp16": 16, "fp8": 8, "int8_sq": 8, "int8_wo": 8, "int4_awq": 4, "int4_wo": 4, "w4a8_awq": 4}


class Judged(NamedTuple):
    """One token of a continuation: its id, and what the original says in its place, in negative log probabilities."""

    token_id: int
    nll: float
    best_id: int
    best_nll: float


class Measures(NamedTuple):
    """Over all texts."""

    num_tokens: int
    token_agreement: float
    perplexity: float
    perplexity_best: float


def summarise(judged: Sequence[Judged]) -> Measures:
    """Raises `BuildError` when there is nothing, or no number."""
    if not judged:
        raise BuildError("the engine continued none of the texts; its first token ended each of them")
    if not all(math.isfinite(each.nll) for each in judged):
        raise BuildError("a token's probability under the original is no number; is the tokenizer the engine's?")
    count = len(judged)
    return Measures(
        num_tokens=count,
        token_agreement=round(sum(each.token_id == each.best_id for each in judged) / count, 4),
        perplexity=round(math.exp(sum(each.nll for each in judged) / count), 4),
        perplexity_best=round(math.exp(sum(each.best_nll for each in judged) / count), 4),
    )


def find_fault(measures: Measures, precision: str) -> str | None:
    """What is too far off for weights of `precision`, None if nothing is."""
    least, most = LIMITS[BITS[precision]]
    ratio = measures.perplexity / measures.perplexity_best
    hint = "; the quantisation went wrong, or precision is too low for this model"
    if measures.token_agreement < least:
        return (
            f"token_agreement is {measures.token_agreement} over {measures.num_tokens} tokens; precision {precision!r} "
            f"must have at least {least}{hint}"
        )
    if ratio > most:
        return (
            f"perplexity is {measures.perplexity}, {ratio:.2f} times the original's own {measures.perplexity_best}; "
            f"precision {precision!r} may have up to {most}{hint}"
        )
    return None


def continue_texts(engine: Path, checkpoint: Path, inputs: Sequence[list[int]], end_id: int) -> list[list[int]]:
    """The engine's greedy continuations, without what ends them; TensorRT-LLM starts the workers of several GPUs."""
    from tensorrt_llm import SamplingParams
    from tensorrt_llm._tensorrt_engine import LLM

    llm = LLM(model=str(engine), tokenizer=str(checkpoint))
    try:
        sampling = SamplingParams(max_tokens=MAX_NEW_TOKENS, top_k=1, end_id=end_id, pad_id=end_id)
        answers = llm.generate([{"prompt_token_ids": ids} for ids in inputs], sampling)
        return [[token for token in answer.outputs[0].token_ids if token != end_id] for answer in answers]
    finally:
        llm.shutdown()


def judge(model: Any, given: Sequence[int], answer: Sequence[int]) -> Iterator[Judged]:
    """What the original, a causal language model of transformers', says of each token of `answer` after `given`."""
    import torch

    with torch.inference_mode():
        ids = torch.tensor([[*given, *answer]], device=model.device)
        logits = model(ids).logits[0, len(given) - 1 : -1].float()
    log_probs = torch.log_softmax(logits, dim=-1)
    best = log_probs.max(dim=-1)
    for index, token_id in enumerate(answer):
        nll, best_nll = -float(log_probs[index, token_id]), -float(best.values[index])
        yield Judged(token_id, nll, int(best.indices[index]), best_nll)


def main(argv: list[str] | None = None) -> int:
    """Run the command; returns its exit code."""
    parser = argparse.ArgumentParser(prog="python -m build.verify_engine")
    parser.add_argument("--engine", type=Path, required=True, help="a folder that trtllm-build wrote")
    parser.add_argument("--checkpoint", type=Path, required=True, help="the original, with its tokenizer")
    parser.add_argument("--precision", choices=sorted(BITS), required=True)
    parser.add_argument("--end_id", type=int, required=True)
    parser.add_argument("--output_dir", type=Path, required=True)
    options = parser.parse_args(argv)
    try:
        measures = _measure(options.engine, options.checkpoint, options.end_id)
        if fault := find_fault(measures, options.precision):
            raise BuildError(f"{options.engine.name}: {fault}")
        options.output_dir.mkdir(parents=True, exist_ok=True)
        result = {"precision": options.precision, "num_texts": len(TEXTS), **measures._asdict()}
        (options.output_dir / "verified.json").write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    except (BuildError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(measures)
    return 0


def _measure(engine: Path, checkpoint: Path, end_id: int) -> Measures:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    inputs = [tokenizer.encode(text) for text in TEXTS]
    answers = continue_texts(engine, checkpoint, inputs, end_id)
    gc.collect()
    torch.cuda.empty_cache()
    model = AutoModelForCausalLM.from_pretrained(checkpoint, torch_dtype="auto", device_map="auto")
    model.eval()
    return summarise([each for given, answer in zip(inputs, answers) for each in judge(model, given, answer)])


if __name__ == "__main__":
    sys.exit(main())
