"""Two engines behind four tiers, through the gateway: the real classifier's choice, and what is left when one hangs."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from collector import Collector
from serving import Answer, Stack, ask, running, script, wait_for

from perf.routing import build_two_engines

EASY = "What is the capital of Portugal?"
HARD = "Prove that every finite integral domain is a field, and then classify all fields of order 16 up to isomorphism."
TIMEOUT_S = 1.0  # the target's

pytestmark = pytest.mark.timeout(300)  # the target is built first


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    with Collector() as collector:
        yield collector


@pytest.fixture(scope="module")
def stack(collector: Collector, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    folder = tmp_path_factory.mktemp("routing")
    env = {"OTEL_EXPORTER_OTLP_ENDPOINT": collector.url, "OTEL_BSP_SCHEDULE_DELAY": "200"}
    with running(build_two_engines(folder / "artifact"), folder / "run", **env) as stack:
        yield stack


def sample(stack: Stack, name: str, **labels: str) -> float:
    """From the gateway's metrics page; 0 for what did not happen yet."""
    page = stack.get("/metrics").text
    for line in page.splitlines():
        if line.startswith(f"{name}{{") and all(f'{label}="{value}"' in line for label, value in labels.items()):
            return float(line.rsplit(" ", 1)[1])
    return 0.0


def test_easy_and_hard_go_to_different_engines(stack: Stack) -> None:
    easy, hard = stack.stream(messages=ask(EASY)).rt, stack.stream(messages=ask(HARD)).rt
    assert (easy["tier"], easy["model"]) == ("simple", "llm_small")
    assert hard["tier"] in ("complex", "expert") and hard["model"] == "llm_large"
    for rt in (easy, hard):
        assert re.fullmatch(r"the cheapest tier that is likely to suffice \([01]\.\d\d\)", rt["reason"]), rt
    wait_for(lambda: sample(stack, "rt_routed_requests_total", tier="simple", reason="suffices") >= 1)
    assert sample(stack, "rt_breaker_state", model="llm_large") == 0


def test_it_is_the_conversation_that_is_judged(stack: Stack) -> None:
    task = [*ask(HARD), {"role": "assistant", "content": "Let D be a finite integral domain. Step 1: …"}]
    assert stack.stream(messages=[*task, *ask("continue")]).rt["model"] == "llm_large"
    assert stack.stream(messages=[*task, *ask("thanks!")]).rt["model"] == "llm_small"


def test_what_is_named_stays(stack: Stack) -> None:
    rt = stack.stream(model="simple", messages=ask(HARD)).rt
    assert (rt["tier"], rt["reason"]) == ("simple", "the request names it")
    assert stack.stream(model="llm_large", messages=ask(EASY)).rt["tier"] == "complex"


def test_a_prompt_beyond_all_windows(stack: Stack) -> None:
    """Case V03."""
    wait_for(lambda: stack.num_live("llm_small") == stack.num_live("llm_large") == 0)  # what was before is told
    answer = stack.post(messages=ask("word " * 9000))
    assert answer.status_code == 400
    assert re.search(r"the prompt's 90\d\d tokens and an answer of up to 1", answer.json()["error"]["message"])
    assert stack.num_live("llm_small") == stack.num_live("llm_large") == 0


def test_one_hangs_and_the_other_answers(stack: Stack) -> None:
    """Case R10."""
    hard = [*ask(HARD)]
    since = stack.log_length()
    with ThreadPoolExecutor(12) as pool:
        # It hangs as long as it takes to be found, left alone and tried in vain.
        hung = pool.submit(stack.stream, model="expert", messages=script(text="x", hang_ms=3500))
        wait_for(lambda: stack.num_live("llm_large") >= 1)
        started_s = time.monotonic()
        pinned = [pool.submit(stack.stream, model="expert", messages=script(text="y")) for _ in range(5)]
        fallen = pool.submit(stack.stream, messages=hard)
        took = []
        for _ in range(10):
            asked_s = time.monotonic()
            assert stack.stream(model="simple", messages=script(text="z")).rt["tier"] == "simple"
            took.append(time.monotonic() - asked_s)
        assert max(took) < TIMEOUT_S, "the living tier waited for the hung one"
        answer: Answer = fallen.result(20)
        assert TIMEOUT_S <= time.monotonic() - started_s < TIMEOUT_S + 2
        assert (answer.rt["model"], answer.rt["attempts"]) == ("llm_small", 2)
        assert re.fullmatch(r"\w+ failed before its first token \(engine_error\); .*", answer.rt["reason"])
        for failed in (hung, *pinned):
            found = failed.result(20)
            assert found.status in (502, 503) and not found.events, found
        # It is out: nobody waits for it.
        wait_for(lambda: sample(stack, "rt_breaker_state", model="llm_large") > 0)
        asked_s = time.monotonic()
        assert "but out" in stack.stream(messages=hard).rt["reason"]
        assert time.monotonic() - asked_s < TIMEOUT_S
        refused = stack.post(model="expert", messages=script(text="x"))
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "tier_unavailable")
        assert int(refused.headers["retry-after"]) >= 1
    # And it comes back by a probe.
    wait_for(lambda: stack.stream(messages=hard).rt["model"] == "llm_large", 20)
    wait_for(lambda: sample(stack, "rt_breaker_state", model="llm_large") == 0)
    assert sample(stack, "rt_tier_timeouts_total", tier="expert") >= 1
    assert sum(sample(stack, "rt_tier_fallbacks_total", tier=tier) for tier in ("complex", "expert")) >= 1
    logged = [line for line in stack.logged("request", since) if line.get("attempts") == 2]
    assert logged and "failed before its first token" in logged[0]["reason"]
    stack.wait_until_idle()
    wait_for(lambda: stack.num_live("llm_large") == 0)


def test_what_a_caller_does_wrong_opens_nothing(stack: Stack) -> None:
    """Case R09."""
    for _ in range(20):
        assert stack.post(model="expert", messages=ask("word " * 9000)).status_code == 400
        assert stack.post(model="expert", messages=ask('#script {"nonsense": 1}')).status_code == 502
    assert stack.stream(model="expert", messages=script(text="x")).text == "x"
    assert sample(stack, "rt_breaker_state", model="llm_large") == 0


def test_one_dies_in_a_stream_and_is_then_replaced(stack: Stack) -> None:
    """Case S20. Its engine comes back when a file that it needs does."""
    since = stack.log_length()
    version = Path(stack.facts["logs"]["triton"]).parents[1] / "artifact" / "model_repository" / "llm_large" / "1"
    tokenizer, gone = version / "tokenizer" / "tokenizer.json", version / "tokenizer" / "gone"
    tokenizer.rename(gone)
    answer = stack.stream(model="expert", messages=script(text="a b c d", die_after=3, itl_ms=50))
    assert answer.error is not None and answer.error["code"] == "engine_error"
    assert (answer.text, answer.finish_reason, answer.is_done) == ("a b c", None, False)
    rt = stack.stream(messages=ask(HARD)).rt
    assert rt["model"] == "llm_small" and rt["attempts"] == 3
    wait_for(lambda: "out" in stack.stream(messages=ask(HARD)).rt["reason"])
    assert stack.get("/ready").json()["not_ready"] == ["llm_large"]
    gone.rename(tokenizer)
    wait_for(lambda: stack.stream(messages=ask(HARD)).rt["model"] == "llm_large", 30)
    wait_for(lambda: sample(stack, "rt_breaker_state", model="llm_large") == 0)
    assert stack.get("/ready").status_code == 200
    assert len(stack.logged("engine_restarted", since)) == 1


def test_a_trace_comes_to_the_collector(stack: Stack, collector: Collector) -> None:
    trace_id, parent_id = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
    headers = {"traceparent": f"00-{trace_id}-{parent_id}-01", "cache-control": "no-store"}
    body = {"model": "simple", "messages": ask(EASY)}
    answer = httpx.post(f"{stack.url}/v1/chat/completions", json=body, headers=headers, timeout=30).json()
    spans = wait_for(lambda: collector.spans_of(trace_id))
    (request,) = (span for span in spans if span.name == "chat")
    assert request.parent_span_id.hex() == parent_id
    stages = [span for span in spans if span.parent_span_id == request.span_id]
    assert [span.name for span in stages] == list(answer["rt"]["stages_ms"])
    took_ns = request.end_time_unix_nano - request.start_time_unix_nano
    assert sum(span.end_time_unix_nano - span.start_time_unix_nano for span in stages) == pytest.approx(
        took_ns, rel=0.02
    )
    assert EASY not in str(spans)
