"""What a GPU target will hold and at best do, from its rows alone: memory, sequences, floors of time, money.

    free   = GPU memory - sum over its engines of (weights + activations + runtime) - what its TensorRT plans may take
    pool   = kv_cache_share of that, in whole blocks; with several GPUs what the fullest one allows
    floors = bytes to read or exchange ÷ bandwidth, operations ÷ peak: no run can be faster, real ones are slower

A target whose engines do not fit, or whose pool is smaller than one sequence, is refused with the sum.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from build.engine_rows import DraftTarget, Eagle, Medusa, NGram, TensorRTLLMParameters
from build.errors import BuildError
from build.gpu_rows import Gpu
from build.model_rows import AnyModelRow, Architecture, ModelRow
from build.pairs import AWQ_BLOCK
from build.rows import TargetRow, TritonModel

GIB = 2**30
HOURS_PER_MONTH = 730
# CUDA context, cuBLAS and NCCL workspaces, and the sampler's buffers, of one engine process. An assumption.
RUNTIME_BYTES = GIB
# Activations live at once, in widths of one layer: a step's inputs, outputs and residual. An assumption, doubled.
ACTIVATION_COPIES = 2
BITS = {"bf16": 16, "fp16": 16, "fp8": 8, "int8_sq": 8, "int8_wo": 8, "int4_awq": 4, "int4_wo": 4, "w4a8_awq": 4}
KV_BYTES = {"auto": 2, "fp8": 1, "int8": 1}


# --- the sums ----------------------------------------------------------------------------------------------


def kv_bytes_per_token(model: Architecture, element_bytes: int) -> int:
    """Keys and values of one token in all layers."""
    return 2 * model.num_layers * model.num_kv_heads * model.head_dim * element_bytes


def matrix_bytes(model: Architecture, precision: str) -> int:
    """The layers' matrices; AWQ adds a 16-bit scale to each block."""
    bits = BITS[precision] + (16 / AWQ_BLOCK if "awq" in precision else 0)
    return math.ceil(model.num_layer_weights * bits / 8)


def rank_weight_bytes(model: Architecture, precision: str, tp_size: int, pp_size: int) -> int:
    """Weights on one GPU: its part of the matrices and the head, and the whole embedding.

    Embedding, head and norms stay in 16 bits, and an engine holds embedding and head apart even where they are tied.
    """
    matrices = matrix_bytes(model, precision) / (tp_size * pp_size)
    head = 2 * model.num_embedding_weights / tp_size
    return math.ceil(matrices + head + 2 * model.num_embedding_weights + 2 * model.num_vector_weights / pp_size)


def draft_bytes(model: Architecture, parameters: TensorRTLLMParameters, models: Mapping[str, AnyModelRow]) -> int:
    """What drafts inside the engine, in 16 bits, reckoned whole for each GPU.

    A Medusa head is a square matrix and a head of its own (Medusa-1); EAGLE is one layer, the matrix that joins its two
    inputs, and a head. The draft model of runtime "engine" is an engine of its own.
    """
    head, square = model.num_embedding_weights, model.hidden_size**2
    if isinstance(parameters.speculation, Medusa):
        return 2 * parameters.speculation.num_heads * (square + head)
    if isinstance(parameters.speculation, Eagle):
        return 2 * (model.num_layer_weights // model.num_layers + 2 * square + head)
    if isinstance(parameters.speculation, DraftTarget) and parameters.runtime == "llmapi":
        draft = models[parameters.speculation.draft_model]
        assert isinstance(draft, ModelRow)
        return rank_weight_bytes(draft.architecture, parameters.precision, 1, 1)
    return 0


def activation_bytes(model: Architecture, max_num_tokens: int, max_batch_size: int, tp_size: int) -> int:
    """The reserve for one step's activations and logits (FP32) on one GPU."""
    attention = (model.num_attention_heads + 2 * model.num_kv_heads) * model.head_dim
    width = 2 * model.hidden_size + (attention + 2 * model.intermediate_size) / tp_size
    logits = 4 * model.vocab_size * max_batch_size
    return math.ceil(ACTIVATION_COPIES * (2 * width * max_num_tokens + logits))


def tokens_per_step(acceptance_rate: float, draft_len: int) -> float:
    """Expected tokens of one verification: (1 - a^(k+1)) ÷ (1 - a), each draft token accepted with chance a."""
    return (1 - acceptance_rate ** (draft_len + 1)) / (1 - acceptance_rate)


def speculative_gain(tokens: float, draft_len: int, draft_ms: float, target_ms: float) -> float:
    """How many times faster than `target_ms` a token, when k drafts and one verification give `tokens`."""
    return tokens * target_ms / (draft_len * draft_ms + target_ms)


def cost_per_million(price_per_hour: float, tokens_per_s: float) -> float:
    """US dollars for a million tokens."""
    return price_per_hour / (tokens_per_s * 3600) * 1e6


def cost_per_month(price_per_hour: float, num_gpus: int) -> float:
    """US dollars for `num_gpus` over a month of 730 hours."""
    return price_per_hour * num_gpus * HOURS_PER_MONTH


def tokens_per_day(tokens_per_request: float, requests_per_s: float) -> float:
    """Tokens of a day at a constant rate."""
    return tokens_per_request * requests_per_s * 86400


# --- the plan ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Lengths:
    """The requests that a plan reckons with, in tokens."""

    input_tokens: int = 1024
    output_tokens: int = 256


@dataclass(frozen=True)
class EnginePlan:
    """One engine; bytes are of one GPU, of one instance. `speculative_gain` is None where no formula tells it.

    It `needs_drafts` where they come with each request, and nobody here sends them.
    """

    model: str
    precision: str
    kv_cache_precision: str
    tp_size: int
    pp_size: int
    tp_size_needed: int | None
    weight_bytes: int
    activation_bytes: int
    runtime_bytes: int
    kv_bytes_per_token: int
    kv_pool_bytes: int
    max_tokens_in_paged_kv_cache: int
    kv_cache_free_gpu_mem_fraction: float
    max_sequences: int
    prefill_floor_ms: float
    itl_floor_ms: float
    itl_floor_full_batch_ms: float
    tokens_per_s_ceiling: float
    cost_floor_per_million_tokens: float
    speculative_gain: float | None
    needs_drafts: bool


@dataclass(frozen=True)
class Plan:
    """A target on `num_gpus` GPUs: `num_replicas` times what one machine of its row holds."""

    target: str
    gpu: str
    num_gpus: int
    num_replicas: int
    cost_per_month: float
    tokens_per_day_ceiling: float
    interconnect: str
    lengths: Lengths
    free_bytes: dict[int, int]
    engines: dict[str, EnginePlan]


@dataclass(frozen=True)
class _Engine:
    """What the sums need of one engine."""

    settings: TritonModel
    parameters: TensorRTLLMParameters
    model: Architecture
    weight_bytes: int
    activation_bytes: int

    @property
    def fixed_bytes(self) -> int:
        return self.weight_bytes + self.activation_bytes + RUNTIME_BYTES

    @property
    def kv_bytes(self) -> int:
        """Of one token, on one GPU."""
        whole = kv_bytes_per_token(self.model, KV_BYTES[self.parameters.kv_cache_precision])
        return whole // self.parameters.world_size

    @property
    def longest(self) -> int:
        """Tokens that the longest sequence takes, in whole blocks; the builder adds the draft tokens."""
        block = self.parameters.tokens_per_block
        return math.ceil((self.parameters.max_seq_len + self.parameters.max_draft_len) / block) * block


def make_plan(
    target: TargetRow, models: Mapping[str, AnyModelRow], lengths: Lengths | None = None, num_gpus: int | None = None
) -> Plan:
    """The plan of `target`; raises `BuildError` with the sum when it does not fit."""
    gpu, lengths = target.gpu, lengths or Lengths()
    if target.vllm_engines:
        raise BuildError(f"target {target.name!r} runs in vLLM, which plans its memory itself (gpu_memory_share)")
    if gpu is None:
        raise BuildError(f"target {target.name!r} has no GPU, so there is nothing to plan")
    num_gpus = num_gpus or gpu.count
    if num_gpus < gpu.count:
        raise BuildError(f"--gpus: {num_gpus} is too few; target {target.name!r} takes {gpu.count} (gpu.count)")
    engines = {
        name: _measure(settings, parameters, models) for name, (settings, parameters) in target.trtllm_engines.items()
    }
    free = _free_memory(target, gpu, engines)
    pools = {name: _pool_tokens(target.name, name, engine, free) for name, engine in engines.items()}
    plans = {}
    for name, engine in engines.items():
        fraction = _fraction(name, engines, pools, free)
        plans[name] = _plan_engine(engine, models, gpu, lengths, pools[name], fraction)
    num_replicas = num_gpus // gpu.count
    return Plan(
        target=target.name,
        gpu=gpu.name,
        num_gpus=num_gpus,
        num_replicas=num_replicas,
        cost_per_month=cost_per_month(gpu.price_per_hour, num_gpus),
        tokens_per_day_ceiling=tokens_per_day(1, num_replicas * _tokens_per_s(target, plans)),
        interconnect=gpu.interconnect,
        lengths=lengths,
        free_bytes=free,
        engines=plans,
    )


def _tokens_per_s(target: TargetRow, plans: Mapping[str, EnginePlan]) -> float:
    """The ceiling of all engines together: those that share a GPU share its time, so its fastest one has all of it."""
    shares: dict[int, float] = {}
    for name, (_, parameters) in target.trtllm_engines.items():
        ids = parameters.gpu_device_ids
        for device in ids:
            shares[device] = max(shares.get(device, 0.0), plans[name].tokens_per_s_ceiling / len(ids))
    return sum(shares.values())


def _measure(settings: TritonModel, parameters: TensorRTLLMParameters, models: Mapping[str, AnyModelRow]) -> _Engine:
    row = models[settings.model or ""]
    assert isinstance(row, ModelRow)
    model = row.architecture
    weights = rank_weight_bytes(model, parameters.precision, parameters.tp_size, parameters.pp_size)
    weights += draft_bytes(model, parameters, models)
    activations = activation_bytes(model, parameters.max_num_tokens, settings.max_batch_size, parameters.tp_size)
    return _Engine(settings, parameters, model, weights, activations)


def plan_bytes(target: TargetRow, device: int) -> int:
    """What the TensorRT plans and ONNX graphs on a GPU may take, all instances."""
    here = [(row, each) for row, each in target.graphs.values() if device in each.gpu_device_ids]
    return sum(row.instance_count * each.memory_mib * 2**20 for row, each in here)


def _free_memory(target: TargetRow, gpu: Gpu, engines: Mapping[str, _Engine]) -> dict[int, int]:
    """Bytes for KV caches on each GPU, after everything that is not KV cache."""
    free = {}
    for device in range(gpu.count):
        here = {name: each for name, each in engines.items() if device in each.parameters.gpu_device_ids}
        plans = plan_bytes(target, device)
        free[device] = gpu.memory_mib * 2**20 - sum(each.fixed_bytes for each in here.values()) - plans
        shares = sum(each.parameters.kv_cache_share for each in here.values())
        if free[device] <= 0:
            raise BuildError(
                f"{target.name}.toml: GPU {device} ({gpu.name}) has {_gib(gpu.memory_mib * 2**20)}, but its engines "
                f"take {' + '.join(f'{name}: {_sum_of(each)}' for name, each in here.items())}"
                f"{f' + {_gib(plans)} plans and graphs (memory_mib)' if plans else ''}; "
                f"that is {_gib(-free[device])} too much; fix: a smaller precision, more tp_size, or fewer engines "
                "a GPU"
            )
        # Sums of decimal fractions: 0.3 + 0.6 is a little less than 0.9.
        if shares > 0.95 + 1e-9:
            raise BuildError(
                f"{target.name}.toml: kv_cache_share: the engines on GPU {device} take {shares:.2f} together "
                f"({', '.join(f'{name}: {each.parameters.kv_cache_share}' for name, each in here.items())}); "
                "allowed: up to 0.95, since the reserves are estimates"
            )
    return free


def _sum_of(engine: _Engine) -> str:
    return (
        f"{_gib(engine.weight_bytes)} weights + {_gib(engine.activation_bytes)} activations + "
        f"{_gib(RUNTIME_BYTES)} runtime"
    )


def _gib(size: float) -> str:
    return f"{size / GIB:.2f} GiB"


def _pool_tokens(target: str, name: str, engine: _Engine, free: Mapping[int, int]) -> int:
    parameters = engine.parameters
    block_bytes = engine.kv_bytes * parameters.tokens_per_block
    least_free = min(free[device] for device in parameters.gpu_device_ids)
    pool = int(least_free * parameters.kv_cache_share)
    tokens = pool // block_bytes * parameters.tokens_per_block
    if tokens < engine.longest:
        raise BuildError(
            f"{target}.toml: models.{name}: the KV cache would hold {tokens} tokens, fewer than one sequence: "
            f"kv_cache_share {parameters.kv_cache_share} of {_gib(least_free)} free is {_gib(pool)}, at "
            f"{engine.kv_bytes} bytes a token; a sequence of max_seq_len {parameters.max_seq_len} takes "
            f"{engine.longest} tokens, {_gib(engine.longest * engine.kv_bytes)}; fix: a smaller max_seq_len or "
            "precision, or more tp_size"
        )
    return tokens


def _fraction(name: str, engines: Mapping[str, _Engine], pools: Mapping[str, int], free: Mapping[int, int]) -> float:
    """The share of the memory that is free when the engine's pool is made, so that the pool is what was planned.

    Triton loads models in any order. When the engine comes last the others' pools are taken already, so of what is left
    it needs most; when it comes earlier, `max_tokens_in_paged_kv_cache` holds it back.
    """
    fractions = []
    for device in engines[name].parameters.gpu_device_ids:
        others = sum(
            pools[other] * each.kv_bytes
            for other, each in engines.items()
            if other != name and device in each.parameters.gpu_device_ids
        )
        fractions.append(pools[name] * engines[name].kv_bytes / (free[device] - others))
    return min(math.ceil(max(fractions) * 10000) / 10000, 1.0)


def _plan_engine(
    engine: _Engine, models: Mapping[str, AnyModelRow], gpu: Gpu, lengths: Lengths, pool_tokens: int, fraction: float
) -> EnginePlan:
    parameters, model, settings = engine.parameters, engine.model, engine.settings
    block = parameters.tokens_per_block
    context = lengths.input_tokens + lengths.output_tokens
    sequences = min(settings.max_batch_size, pool_tokens // (math.ceil(context / block) * block))
    itl_ms = decode_floor_ms(model, parameters, gpu, 1, context)
    full_itl_ms = decode_floor_ms(model, parameters, gpu, max(sequences, 1), context)
    tokens_per_s = settings.instance_count * max(sequences, 1) * 1000 / full_itl_ms
    price = gpu.price_per_hour * len(parameters.gpu_device_ids)
    return EnginePlan(
        model=settings.model or "",
        precision=parameters.precision,
        kv_cache_precision=parameters.kv_cache_precision,
        tp_size=parameters.tp_size,
        pp_size=parameters.pp_size,
        tp_size_needed=tp_size_needed(model, parameters, settings.max_batch_size, gpu),
        weight_bytes=engine.weight_bytes,
        activation_bytes=engine.activation_bytes,
        runtime_bytes=RUNTIME_BYTES,
        kv_bytes_per_token=engine.kv_bytes,
        kv_pool_bytes=pool_tokens * engine.kv_bytes,
        max_tokens_in_paged_kv_cache=pool_tokens,
        kv_cache_free_gpu_mem_fraction=fraction,
        max_sequences=sequences,
        prefill_floor_ms=prefill_floor_ms(model, parameters, gpu, lengths.input_tokens),
        itl_floor_ms=itl_ms,
        itl_floor_full_batch_ms=full_itl_ms,
        tokens_per_s_ceiling=tokens_per_s,
        cost_floor_per_million_tokens=cost_per_million(price, tokens_per_s),
        speculative_gain=_gain(parameters, models, gpu, itl_ms, context),
        needs_drafts=isinstance(parameters.speculation, DraftTarget) and parameters.runtime == "engine",
    )


def tp_size_needed(model: Architecture, parameters: TensorRTLLMParameters, max_batch_size: int, gpu: Gpu) -> int | None:
    """The fewest GPUs by tensor parallelism that hold the engine alone and one longest sequence; None if none do."""
    for tp_size in (1, 2, 4, 8):
        if model.num_kv_heads % tp_size:
            continue
        pp_size = parameters.pp_size
        fixed = rank_weight_bytes(model, parameters.precision, tp_size, pp_size) + RUNTIME_BYTES
        fixed += activation_bytes(model, parameters.max_num_tokens, max_batch_size, tp_size)
        longest = parameters.max_seq_len + parameters.max_draft_len
        kv = kv_bytes_per_token(model, KV_BYTES[parameters.kv_cache_precision]) * longest / (tp_size * pp_size)
        if fixed + kv <= gpu.memory_mib * 2**20:
            return tp_size
    return None


def _peak(precision: str, gpu: Gpu) -> float:
    """Operations per second of the matrices' arithmetic; weight-only formats compute in 16 bits."""
    if precision in ("fp8", "w4a8_awq"):
        assert gpu.fp8_tflops is not None  # `build.pairs` refused earlier GPUs, the row later ones without it
        return gpu.fp8_tflops * 1e12
    return (gpu.int8_tops if precision == "int8_sq" else gpu.fp16_tflops) * 1e12


def prefill_floor_ms(model: Architecture, parameters: TensorRTLLMParameters, gpu: Gpu, num_tokens: int) -> float:
    """A prompt's operations at the tensor cores' peak: two for each weight and token, and causal attention."""
    matrices = 2 * model.num_layer_weights * num_tokens
    # Scores and weighted values, 2 operations each, over half of all pairs.
    attention = 2 * model.num_layers * model.num_attention_heads * model.head_dim * num_tokens**2
    # trtllm-build --use_fp8_context_fmha: with FP8 weights attention computes in FP8, too.
    attention_peak = _peak("fp8" if parameters.precision == "fp8" else "fp16", gpu)
    seconds = matrices / _peak(parameters.precision, gpu) + attention / attention_peak
    seconds += 2 * model.num_embedding_weights / _peak("fp16", gpu)
    return max(seconds / parameters.tp_size, _exchange_s(model, parameters, gpu, num_tokens)) * 1000


def decode_floor_ms(
    model: Architecture, parameters: TensorRTLLMParameters, gpu: Gpu, batch: int, context: int
) -> float:
    """A step of `batch` sequences of `context` tokens: weights and KV are read, or the operations if those are longer.

    With pipeline stages each works on a part of the batch, all at once; a token goes through one after another, so over
    all of them it is the weights and the KV of such a part.
    """
    batch_of_stage = max(batch / parameters.pp_size, 1)
    kv = kv_bytes_per_token(model, KV_BYTES[parameters.kv_cache_precision]) * context * batch_of_stage
    read = matrix_bytes(model, parameters.precision) + 2 * model.num_embedding_weights + kv
    compute = 2 * batch_of_stage * model.num_layer_weights / _peak(parameters.precision, gpu)
    seconds = max(read / (gpu.memory_gb_per_s * 1e9), compute) / parameters.tp_size
    return max(seconds, _exchange_s(model, parameters, gpu, batch_of_stage)) * 1000


def _exchange_s(model: Architecture, parameters: TensorRTLLMParameters, gpu: Gpu, num_tokens: float) -> float:
    """Of the GPUs of tensor parallelism: each sends its sums of two products a layer, in 16 bits, at least once."""
    if parameters.tp_size == 1:
        return 0.0
    one_way = gpu.interconnect_gb_per_s / 2 * 1e9
    return 2 * model.num_layers * 2 * model.hidden_size * num_tokens / one_way


def _gain(
    parameters: TensorRTLLMParameters, models: Mapping[str, AnyModelRow], gpu: Gpu, itl_ms: float, context: int
) -> float | None:
    """None without speculation, and for trees of drafts (Medusa, lookahead), which the formula does not fit."""
    speculation = parameters.speculation
    if not isinstance(speculation, (DraftTarget, Eagle, NGram)):
        return None
    draft_ms = 0.0  # a lookup, or one layer
    if isinstance(speculation, DraftTarget):
        draft = models[speculation.draft_model]
        assert isinstance(draft, ModelRow)
        draft_ms = decode_floor_ms(draft.architecture, parameters, gpu, 1, context)
    tokens = tokens_per_step(speculation.acceptance_rate, speculation.max_draft_len)
    return speculative_gain(tokens, speculation.max_draft_len, draft_ms, itl_ms)
