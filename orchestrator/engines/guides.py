"""Guides (JSON schemas, regular expressions, grammars) in OpenVINO GenAI, and the process that tries them.

    python -m orchestrator.engines.guides <folder of the tokenizer> <size of the vocabulary>

reads a guide a line and answers with a line of JSON, see `engines.guide_checker`. It ends itself when a guide takes
too long or too much memory.
"""

from __future__ import annotations

import os
import re
import resource
import signal
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import openvino
import openvino_genai as genai
from openvino import opset13 as ops

from orchestrator import contracts
from orchestrator.engines import EngineRefusal
from orchestrator.engines.guide_checker import COMPILE_LIMIT_S, COMPILE_TIMEOUT_S, Guide
from orchestrator.engines.guide_grammar import to_grammar
from orchestrator.engines.worker import write_line

# The lowest: whoever waits for tokens comes before a guide that is new.
COMPILE_NICENESS = 19
# Three times what the process has mapped before its first guide.
MAX_DATA_BYTES = 1 << 30
# Of one compiled guide; the engine holds eight of them (`openvino.MAX_ALL_GUIDES_BYTES`).
MAX_GUIDE_BYTES = 32 << 20
# A compiled guide is followed some tokens far, at random, as all streams will wait for each token of each guided one.
# Processor time, two cores: common guides cost 1 ms a token or less, {"type": "string", "maxLength": 500} costs 1,000.
TRIED_SEEDS = (1, 2)
TRIED_TOKENS = 32
MAX_MS_PER_TOKEN = 5.0

_NAME = contracts.GUIDED_DECODING_GUIDE.name


def to_structured_output(guide: Guide) -> genai.StructuredOutputConfig:
    """The guide in GenAI's words. Raises `EngineRefusal` for what a grammar cannot say."""
    return genai.StructuredOutputConfig(grammar=to_grammar(guide.type, guide.text))


class GuideCompiler:
    """Compiles guides by generating with a model that computes nothing.

    GenAI has no call for it: it compiles before a request's first token is sampled, and then keeps the result with the
    tokenizer. Whoever generates with the same tokenizer, in any pipeline whose logits have the same width, finds it.
    """

    def __init__(self, tokenizer: genai.Tokenizer, vocab_size: int) -> None:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "model.xml")
            openvino.save_model(_empty_model(vocab_size), path)
            weights = openvino.Tensor(np.fromfile(path.with_suffix(".bin"), np.uint8))
            self._pipeline = genai.LLMPipeline(path.read_text(), weights, tokenizer, "CPU", ATTENTION_BACKEND="SDPA")
        self._end_id = tokenizer.get_eos_token_id()

    def generate(self, guide: Guide, num_tokens: int = 1, seed: int = 0, *, may_end: bool = False) -> list[int]:
        """Generate `num_tokens` that follow `guide` (as far as it goes), at random; the global lock is free meanwhile.

        Returns their ids, fewer with `may_end` if the text ended. Raises `RuntimeError` with GenAI's words when the
        guide does not compile, and `EngineRefusal` when no grammar can say it.
        """
        config = genai.GenerationConfig(
            max_new_tokens=num_tokens,
            min_new_tokens=0 if may_end else num_tokens,  # a guide that may end soon is followed all the same
            do_sample=True,
            rng_seed=seed,
            apply_chat_template=False,
        )
        config.eos_token_id = self._end_id
        config.stop_token_ids = {self._end_id}
        config.structured_output_config = to_structured_output(guide)
        results = self._pipeline.generate(openvino.Tensor(np.array([[self._end_id]], np.int64)), config)
        return [int(token_id) for token_id in results.tokens[0]]


def _empty_model(vocab_size: int) -> openvino.Model:
    """A language model's inputs and outputs, with logits of 0 for whatever comes in."""
    inputs = []
    for name, shape, dtype in (
        ("input_ids", [-1, -1], np.int64),  # [batch, tokens]
        ("attention_mask", [-1, -1], np.int64),
        ("position_ids", [-1, -1], np.int64),
        ("beam_idx", [-1], np.int32),
    ):
        inputs.append(ops.parameter(shape, dtype, name=name))
        inputs[-1].output(0).set_names({name})
    shape_of_logits = ops.concat([ops.shape_of(inputs[0]), ops.constant(np.array([vocab_size]))], 0)
    logits = ops.result(ops.broadcast(ops.constant(np.float32(0)), shape_of_logits))  # [batch, tokens, vocabulary]
    logits.output(0).set_names({"logits"})
    return openvino.Model([logits], inputs)


def refuse(compiler: GuideCompiler, guide: Guide) -> str | None:
    """Why `guide` cannot be used, or None."""
    try:
        compiler.generate(guide)
        began_s = time.process_time()
        for seed in TRIED_SEEDS:
            compiler.generate(guide, TRIED_TOKENS, seed)
    except RuntimeError as error:
        return f"{_NAME}: {shorten(str(error))}"
    except EngineRefusal as refusal:
        return str(refusal)
    ms_per_token = (time.process_time() - began_s) * 1000 / (len(TRIED_SEEDS) * TRIED_TOKENS)
    if ms_per_token > MAX_MS_PER_TOKEN:
        return (
            f"{_NAME}: costs {ms_per_token:.0f} ms a token; at most {MAX_MS_PER_TOKEN:g} are allowed, make it simpler"
        )
    return None


def shorten(text: str) -> str:
    """What a compiler's message says, without the time and the source file that stand before it."""
    return re.sub(r"^.*\.cc:\d+: ", "", text, flags=re.DOTALL).strip()[:300]


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def main() -> None:
    out_fd = os.dup(1)
    os.dup2(2, 1)  # whatever a library prints must not get between our lines
    os.setpriority(os.PRIO_PROCESS, 0, COMPILE_NICENESS)
    folder, vocab_size = sys.argv[1:]
    compiler = GuideCompiler(genai.Tokenizer(folder), int(vocab_size))
    refuse(compiler, Guide("json", None))  # or the first guide would be charged with what all of them need
    resource.setrlimit(resource.RLIMIT_DATA, (MAX_DATA_BYTES, MAX_DATA_BYTES))
    write_line(out_fd, {"ready": True})
    for line in sys.stdin.buffer:
        # Their signals are not caught, so they end the process even inside of GenAI.
        signal.setitimer(signal.ITIMER_PROF, COMPILE_LIMIT_S)
        signal.setitimer(signal.ITIMER_REAL, COMPILE_TIMEOUT_S)
        before = _resident_bytes()
        refusal = refuse(compiler, Guide.from_line(line))
        num_bytes = max(0, _resident_bytes() - before)
        if refusal is None and num_bytes > MAX_GUIDE_BYTES:
            refusal = f"{_NAME}: takes {num_bytes >> 20} MB compiled; at most {MAX_GUIDE_BYTES >> 20} are allowed"
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.setitimer(signal.ITIMER_PROF, 0)
        write_line(out_fd, {"refusal": refusal, "num_bytes": num_bytes})


if __name__ == "__main__":
    main()
