"""The planner's sums, held against numbers known from elsewhere, and what it refuses."""

from __future__ import annotations

import json
import math

import pytest
from gpu_targets import GPU_TARGETS, SPECULATION, alone, vary
from hypothesis import given
from hypothesis import strategies as st

from build.__main__ import main
from build.errors import BuildError
from build.model_rows import ModelRow
from build.plan import (
    GIB,
    Lengths,
    cost_per_million,
    cost_per_month,
    kv_bytes_per_token,
    make_plan,
    matrix_bytes,
    rank_weight_bytes,
    speculative_gain,
    tokens_per_day,
    tokens_per_step,
)
from build.plan_report import _usual_lengths
from build.rows import HERE, load_models, load_target
from orchestrator.config import read_toml


def architecture(name: str) -> ModelRow:
    return read_toml(HERE / "models" / f"{name}.toml", ModelRow)


# --- the sums ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "num_parameters"),
    [
        # The sum of the tensors' sizes in each checkpoint's index.
        ("llama-3.1-8b-instruct", 8_030_261_248),
        ("llama-3.1-70b-instruct", 70_553_706_496),
        ("llama-3.2-1b-instruct", 1_235_814_400),
        ("qwen2.5-7b-instruct", 7_615_616_512),
        ("smollm2-135m-instruct", 134_515_008),
    ],
)
def test_parameters_are_those_of_the_checkpoint(model: str, num_parameters: int) -> None:
    assert architecture(model).architecture.num_parameters == num_parameters


def test_kv_cache_of_70b() -> None:
    # 32 sequences of 8,192 tokens, FP16: 80.0 GiB, 85.9 GB; "about 67 GB" has been published.
    size = kv_bytes_per_token(architecture("llama-3.1-70b-instruct").architecture, 2) * 8192 * 32
    assert size / GIB == 80.0
    assert round(size / 1e9, 1) == 85.9


def test_weights_of_70b() -> None:
    numbers = architecture("llama-3.1-70b-instruct").architecture
    # 68.5 of 70.6 billion are matrices; 4.125 bits each with AWQ's scales.
    assert matrix_bytes(numbers, "fp8") == numbers.num_layer_weights == 68_451_041_280
    assert matrix_bytes(numbers, "int4_awq") == math.ceil(68_451_041_280 * 4.125 / 8)
    assert round(rank_weight_bytes(numbers, "bf16", 1, 1) / 1e9) == 141
    halves = rank_weight_bytes(numbers, "fp8", 2, 1)
    assert rank_weight_bytes(numbers, "fp8", 1, 1) / 2 < halves < rank_weight_bytes(numbers, "fp8", 1, 1)


def test_expected_tokens_of_a_step() -> None:
    assert round(tokens_per_step(0.8, 5), 2) == 3.69  # "about 5" is the limit of endless drafts
    assert round(tokens_per_step(0.8, 1000), 2) == 5.0


def test_expected_speculative_gain() -> None:
    # Five drafts of 2 ms and one verification of 30 ms: 40 ms. Three accepted and one more make 4 tokens, 3.0x.
    assert speculative_gain(4, 5, 2.0, 30.0) == 3.0
    assert round(speculative_gain(tokens_per_step(0.8, 5), 5, 2.0, 30.0), 1) == 2.8


@given(st.floats(0.01, 0.99), st.integers(1, 64))
def test_tokens_of_a_step_are_the_mean_of_the_geometric_law(acceptance_rate: float, draft_len: int) -> None:
    # j drafts accepted and then one refused, or all accepted; one token more either way.
    some = sum((j + 1) * acceptance_rate**j * (1 - acceptance_rate) for j in range(draft_len))
    assert tokens_per_step(acceptance_rate, draft_len) == pytest.approx(
        some + (draft_len + 1) * acceptance_rate**draft_len
    )


def test_money() -> None:
    assert (round(cost_per_month(2, 4)), round(cost_per_month(3, 4))) == (5840, 8760)  # not $25,000 for four A100
    assert cost_per_million(3.6, 1000) == pytest.approx(1.0)
    assert tokens_per_day(3000, 1000) == pytest.approx(259.2e9)  # not 2.6 billion


# --- the plan ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", GPU_TARGETS)
def test_every_target_fits(name: str) -> None:
    target = load_target(name)
    plan = make_plan(target, load_models(target))
    assert target.gpu is not None
    for engine, (settings, parameters) in target.trtllm_engines.items():
        planned = plan.engines[engine]
        assert planned.max_tokens_in_paged_kv_cache >= parameters.max_seq_len
        assert planned.max_tokens_in_paged_kv_cache % parameters.tokens_per_block == 0
        assert planned.tp_size_needed is not None and planned.tp_size_needed <= parameters.tp_size
        assert 0 < planned.max_sequences <= settings.max_batch_size
    for device in range(target.gpu.count):
        taken = sum(
            plan.engines[engine].weight_bytes
            + plan.engines[engine].activation_bytes
            + plan.engines[engine].runtime_bytes
            + plan.engines[engine].kv_pool_bytes
            for engine, (_, parameters) in target.trtllm_engines.items()
            if device in parameters.gpu_device_ids
        )
        assert 0.8 < taken / (target.gpu.memory_mib * 2**20) < 1


@pytest.mark.parametrize("name", GPU_TARGETS)
def test_pools_are_as_planned_in_whatever_order_engines_load(name: str) -> None:
    target = load_target(name)
    plan = make_plan(target, load_models(target))
    names = list(target.trtllm_engines)
    for order in (names, names[::-1]):
        free = dict(plan.free_bytes)  # weights and reserves of all are taken: the worst that an engine can meet
        for engine in order:
            planned, ids = plan.engines[engine], target.trtllm_engines[engine][1].gpu_device_ids
            for device in ids:
                by_fraction = free[device] * planned.kv_cache_free_gpu_mem_fraction
                assert by_fraction >= planned.kv_pool_bytes  # so the limit in tokens decides
            for device in ids:
                free[device] -= planned.kv_pool_bytes


def test_floors_scale_as_physics_says() -> None:
    target, models = vary("h200")
    short = make_plan(target, models, Lengths(512, 128)).engines["llm_large"]
    long = make_plan(target, models, Lengths(2048, 512)).engines["llm_large"]
    assert 4 < long.prefill_floor_ms / short.prefill_floor_ms < 4.5  # linear, and a little for attention
    assert long.itl_floor_ms < 1.02 * short.itl_floor_ms  # one sequence: the weights are nearly all there is to read
    # 68.5 GB of weights and the 2.1 GB head at 4.8 TB/s.
    assert short.itl_floor_ms == pytest.approx(14.7, abs=0.1)


def test_pipeline_stages_work_side_by_side() -> None:
    target, models = alone("h100", tp_size=1, pp_size=2)
    plan = make_plan(target, models).engines["llm_large"]
    # Two parts of 64: each stage reads half of the weights and the KV of 64 sequences.
    assert plan.max_sequences == 128
    assert plan.itl_floor_full_batch_ms == pytest.approx(25.1, abs=0.1)
    assert plan.tokens_per_s_ceiling == pytest.approx(5096, rel=0.005)


def test_attention_of_fp8_weights_is_fp8() -> None:
    def prefill(precision: str) -> float:
        plan = make_plan(*alone("h200", precision=precision), Lengths(4096, 256)).engines["llm_large"]
        return plan.prefill_floor_ms

    numbers = architecture("llama-3.1-70b-instruct").architecture
    operations = 2 * numbers.num_layer_weights * 4096 + 2 * 80 * 8192 * 4096**2
    head = 2 * numbers.num_embedding_weights / 989.4e12
    assert prefill("fp8") == pytest.approx((operations / 1978.9e12 + head) * 1000, rel=1e-3)


def test_sums_are_exchanged_between_gpus() -> None:
    fast = make_plan(*alone("h100", tp_size=2)).engines["llm_large"]
    target, models = alone("h100", tp_size=2)
    assert target.gpu is not None
    slow_gpu = target.gpu.model_copy(update={"interconnect": "pcie", "interconnect_gb_per_s": 64.0})
    slow = make_plan(target.model_copy(update={"gpu": slow_gpu}), models).engines["llm_large"]
    # 1,024 tokens: two products of 80 layers, 8,192 sums of 2 bytes each, at 32 GB/s.
    assert slow.prefill_floor_ms == pytest.approx(1024 * 80 * 2 * 8192 * 2 / 32e9 * 1000)
    assert fast.prefill_floor_ms < slow.prefill_floor_ms / 2


def test_lengths_that_nobody_gave_fit(capsys: pytest.CaptureFixture[str]) -> None:
    target, _ = vary("l4", max_input_len=512, max_seq_len=600)
    assert _usual_lengths(target) == Lengths(512, 88)
    assert _usual_lengths(load_target("l4")) == Lengths()


def test_an_engine_that_does_not_fit_is_refused_with_the_sum() -> None:
    target, models = vary("l4", settings={"model": "llama-3.1-70b-instruct"})
    with pytest.raises(BuildError) as caught:
        make_plan(target, models)
    assert str(caught.value) == (
        "l4.toml: GPU 0 (NVIDIA L4) has 22.49 GiB, but its engines take llm_small: 1.88 GiB weights + 0.42 GiB "
        "activations + 1.00 GiB runtime + llm_large: 67.67 GiB weights + 1.31 GiB activations + 1.00 GiB runtime + "
        "1.69 GiB plans and graphs (memory_mib); that is 52.48 GiB too much; fix: a smaller precision, more tp_size, "
        "or fewer engines a GPU"
    )


def test_a_pool_smaller_than_one_sequence_is_refused_with_the_sum() -> None:
    # Else the backend would find out at its first long request.
    target, models = vary("l4", max_seq_len=131072)
    with pytest.raises(BuildError) as caught:
        make_plan(target, models)
    assert str(caught.value) == (
        "l4.toml: models.llm_large: the KV cache would hold 72320 tokens, fewer than one sequence: kv_cache_share 0.6 "
        "of 7.36 GiB free is 4.41 GiB, at 65536 bytes a token; a sequence of max_seq_len 131072 takes 131072 tokens, "
        "8.00 GiB; fix: a smaller max_seq_len or precision, or more tp_size"
    )


def test_shares_of_a_gpu_leave_room_for_what_was_estimated() -> None:
    target, models = vary("l4", kv_cache_share=0.7)
    with pytest.raises(
        BuildError, match=r"kv_cache_share: the engines on GPU 0 take 1\.00 together \(llm_small: 0\.3, "
    ):
        make_plan(target, models)


def test_the_fewest_gpus() -> None:
    target, models = alone("h100", precision="bf16", kv_cache_precision="auto", tp_size=2)
    assert make_plan(target, models).engines["llm_large"].tp_size_needed == 2
    target, models = alone("h100", precision="fp8", tp_size=2)
    assert make_plan(target, models).engines["llm_large"].tp_size_needed == 1


def test_a_draft_model_costs_what_it_reads() -> None:
    target, models = alone("h200", runtime="engine", speculation=SPECULATION["draft_target"])
    gain = make_plan(target, models).engines["llm_large"].speculative_gain
    # Five drafts of the 1B model cost a third of a step of the 70B one.
    assert gain is not None and 2.5 < gain < 3.69
    target, models = alone("h200", speculation=SPECULATION["lookahead"])
    assert make_plan(target, models).engines["llm_large"].speculative_gain is None


def test_medusa_heads_are_part_of_the_weights() -> None:
    plain = make_plan(*alone("h200")).engines["llm_large"]
    medusa = make_plan(*alone("h200", speculation=SPECULATION["medusa"], max_num_tokens=8192)).engines["llm_large"]
    assert medusa.weight_bytes - plain.weight_bytes == 2 * 4 * (8192**2 + 128256 * 8192)


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--target", "h100", "--gpus", "4", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert (plan["num_gpus"], plan["num_replicas"], plan["cost_per_month"]) == (4, 2, 8760)
    assert plan["engines"]["llm_large"]["kv_bytes_per_token"] == 2 * 80 * 8 * 128 // 2
    assert main(["plan", "--target", "h100"]) == 0
    table = capsys.readouterr().out
    assert "nothing here was measured" in table
    assert "max_tokens_in_paged_kv_cache" in table
    assert main(["plan", "--target", "h100", "--gpus", "1"]) == 1
    assert capsys.readouterr().err == "error: --gpus: 1 is too few; target 'h100' takes 2 (gpu.count)\n"
    assert main(["plan", "--target", "cpu"]) == 1
    assert capsys.readouterr().err == "error: target 'cpu' has no GPU, so there is nothing to plan\n"
    assert main(["plan", "--target", "h100-vllm"]) == 1
    assert "runs in vLLM, which plans its memory itself" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["plan", "--target", "h100", "--gpus", "0"])


def test_gpus_that_no_replica_takes_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--target", "h100", "--gpus", "5"]) == 0
    assert capsys.readouterr().out.startswith("h100: 5 x NVIDIA H100 80GB HBM3, replicas: 2, idle: 1, $10,950 a month")


def test_requests_that_no_engine_takes_are_refused_with_the_sum(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--target", "l4", "--input-tokens", "6000", "--output-tokens", "3000"]) == 1
    assert capsys.readouterr().err == (
        "error: --input-tokens, --output-tokens: 6000 + 3000 = 9000; l4.toml: models.llm_small takes prompts of up to "
        "6144 (max_input_len) and 8192 with the answer (max_seq_len)\n"
    )
    assert main(["plan", "--target", "l4", "--input-tokens", "6145", "--output-tokens", "1"]) == 1
    assert main(["plan", "--target", "l4", "--input-tokens", "6144", "--output-tokens", "2048"]) == 0


def test_engines_that_share_gpus_share_their_time() -> None:
    target = load_target("h100")
    plan = make_plan(target, load_models(target), num_gpus=4)
    # The small engine is on both GPUs, and faster than the large one over both.
    rates = {name: engine.tokens_per_s_ceiling for name, engine in plan.engines.items()}
    assert rates["llm_small"] > rates["llm_large"]
    assert plan.tokens_per_day_ceiling == pytest.approx(2 * rates["llm_small"] * 86400)
