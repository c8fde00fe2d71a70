"""Quality, safety and money on a real server: the expert is an API on loopback, the cheap tiers answer as told."""

from __future__ import annotations

import contextlib
import io
import json
import re
import time
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import httpx
import pytest
from fake_cloud import FakeCloud, Reply, answer, fake_cloud
from serving import CHAT_PATH, Stack, running, script, wait_for
from test_cloud_tier import HERE, KEY, TIER

from build.compiler import build
from build.fetch import cache_folder
from build.rows import load_models, load_target
from orchestrator.__main__ import main

GOOD = "The capital of France is Paris, a city on the Seine."
NONSENSE = "Purple elephants juggle seventeen umbrellas of cheese."
CARD = "4111 1111 1111 1111"
QUALITY = """
[quality]
sampling = 1.0
expert = "cloud"
timeout_s = 2.0
[safety]
words = ["nightfall"]
"""

pytestmark = pytest.mark.timeout(180)


class World:
    """A server that can be started again, its keys, and its expert."""

    def __init__(self, folder: Path, cloud: FakeCloud) -> None:
        self.folder = folder
        self.cloud = cloud
        self.keys: dict[str, str] = {}
        self.errors: list[str] = []
        self.pages: list[str] = []
        self.add("operator", "--metrics")
        self.add("open", "--allow-cloud-sampling", "--keep-text")
        self.add("closed")
        self.add("careful", "--hold-flagged")
        self.stack: Stack

    def add(self, tenant: str, *rights: str) -> None:
        path = f"--keys={self.folder / 'keys.json'}"
        self.keys[tenant] = run_command("keys", "add", path, "--tenant", tenant, *rights).strip()

    def post(self, tenant: str, text: str, **fields: Any) -> httpx.Response:
        response = httpx.post(
            f"{self.stack.url}{CHAT_PATH}",
            json={"model": "auto", "messages": script(text=text), **fields},
            headers={"authorization": f"Bearer {self.keys[tenant]}"},
            timeout=20,
        )
        if response.status_code != 200:
            self.errors.append(response.text)
        return response

    def metric(self, name: str, **labels: str) -> float:
        """A sample of Triton's page whose labels are these; 0 where there is none yet."""
        page = httpx.get(self.stack.facts["triton_metrics_url"], timeout=10).text
        self.pages.append(page)
        written = ",".join(f'{key}="{value}"' for key, value in sorted(labels.items()))
        found = re.search(rf"^{name}{{{written}}} (\S+)$" if labels else rf"^{name} (\S+)$", page, re.MULTILINE)
        return float(found[1]) if found else 0.0

    def samples(self, tier: str = "simple") -> float:
        return sum(self.metric("rt_quality_samples_total", tier=tier, verdict=each) for each in ("good", "poor"))

    def has_samples(self, num: float) -> None:
        wait_for(lambda: self.samples() >= num, 30)


def run_command(*arguments: str) -> str:
    with contextlib.redirect_stdout(io.StringIO()) as output:
        assert main(arguments) == 0
    return output.getvalue()


@pytest.fixture(scope="module")
def cloud() -> Iterator[FakeCloud]:
    with fake_cloud() as cloud:
        cloud.reply = Reply(answer(GOOD))
        yield cloud


@pytest.fixture(scope="module")
def world(cloud: FakeCloud, tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    folder = tmp_path_factory.mktemp("quality")
    row = (HERE / "build" / "targets" / "scripted.toml").read_text(encoding="utf-8")
    (folder / "scripted.toml").write_text(row + TIER.format(url=cloud.url) + QUALITY, encoding="utf-8")
    target = load_target("scripted", folder)
    build(target, load_models(target), folder / "artifact", cache=cache_folder(), progress=lambda _: nullcontext())
    world = World(folder, cloud)
    with serving(world):
        yield world


@contextlib.contextmanager
def serving(world: World) -> Iterator[None]:
    keys = f"--keys={world.folder / 'keys.json'}"
    with running(world.folder / "artifact", world.folder / "run", keys, FAKE_CLOUD_KEY=KEY) as world.stack:
        yield


# The tests below are one story, in this order.


def test_text_goes_to_the_cloud_for_no_tenant_that_does_not_allow_it(world: World) -> None:
    for _ in range(3):
        assert world.post("closed", GOOD).status_code == 200
    wait_for(lambda: world.metric("rt_quality_dropped_total", reason="not_allowed") == 3)
    assert world.cloud.got == [] and world.samples() == 0


def test_a_good_answer_is_good(world: World) -> None:
    assert world.post("open", GOOD, stream=True).status_code == 200
    world.has_samples(1)
    assert world.metric("rt_quality_samples_total", tier="simple", verdict="good") == 1
    (got,) = world.cloud.got
    assert "user" not in got.body and got.body["messages"] == script(text=GOOD)


def test_live_requests_do_not_notice_that_the_expert_hangs(world: World) -> None:
    def times(num: int) -> list[float]:
        taken = []
        for _ in range(num):
            started_s = time.monotonic()
            assert world.post("open", GOOD).status_code == 200
            taken.append(time.monotonic() - started_s)
        return sorted(taken)

    before = times(10)
    world.has_samples(11)
    world.cloud.reply = Reply([], end="hang")
    during = times(40)
    assert during[-2] < 3 * before[-1] + 0.1, (before, during)
    assert world.metric("rt_quality_dropped_total", reason="full") > 0
    wait_for(lambda: world.metric("rt_quality_dropped_total", reason="failed") > 0)
    world.cloud.reply = Reply(answer(GOOD))
    assert world.stack.logged("quality_failed")[0]["error"] == "DeadlineError"
    wait_for(lambda: world.samples() > 11, 30)


def test_a_tier_that_answers_nonsense_becomes_doubtful_and_auto_goes_a_tier_up(world: World) -> None:
    for _ in range(12):
        known = world.samples()
        for _ in range(8):
            assert world.post("open", NONSENSE, model="simple").status_code == 200
        world.has_samples(known + 8)
        if world.metric("rt_quality_doubtful", tier="simple"):
            break
    assert world.metric("rt_quality_doubtful", tier="simple") == 1
    assert world.metric("rt_quality_doubtful", tier="medium") == 0
    assert world.post("closed", GOOD).json()["rt"]["tier"] == "medium"
    assert world.post("closed", GOOD, model="simple").json()["rt"]["tier"] == "simple"
    events = world.stack.logged("quality_doubtful")
    assert events[0]["tier"] == "simple" and events[0]["num"] >= 50


def test_it_survives_a_restart(world: World) -> None:
    samples = world.samples()
    world.stack.stop()
    with serving(world):
        wait_for(lambda: world.metric("rt_quality_doubtful", tier="simple") == 1)
        assert world.samples() == samples
        flags = [str(world.folder / "artifact"), f"--run-dir={world.folder / 'run'}"]
        facts = json.loads(run_command("quality", "status", *flags, "--json"))
        assert facts["records"][0]["is_doubtful"] and sum(facts["samples"]["simple"].values()) == samples
        assert "doubtful" in run_command("quality", "status", *flags)
        lines = run_command("quality", "cases", flags[1]).splitlines()
        assert json.loads(lines[0]) == {"messages": script(text=NONSENSE), "tier": "medium", "domain": "quality"}
        # The other tests of this story go on with this server.
        check_safety(world)
        check_money(world)
        check_secrets(world)


def check_safety(world: World) -> None:
    text = f"Here you are. Pay with {CARD}. Good bye."
    sent = world.post("closed", text).json()
    assert sent["choices"][0]["finish_reason"] == "stop" and CARD in sent["choices"][0]["message"]["content"]
    wait_for(lambda: world.metric("rt_safety_flagged_total", kind="card_number", when="sent") == 1)
    since = world.stack.log_length()
    held = world.post("careful", text).json()["choices"][0]
    assert (held["message"]["content"].strip(), held["finish_reason"]) == ("Here you are.", "content_filter")
    streamed = world.post("careful", text, stream=True).text
    assert "content_filter" in streamed and "4111" not in streamed and streamed.endswith("data: [DONE]\n\n")
    line = world.stack.wait_for_log("flagged", since)
    assert (line["when"], line["kinds"], line["tenant"]) == ("held", {"card_number": 1}, "careful")
    wait_for(lambda: world.metric("rt_safety_flagged_total", kind="card_number", when="held") == 2)


def check_money(world: World) -> None:
    answered = world.post("careful", GOOD, model="complex").json()
    wait_for(lambda: world.metric("rt_tenant_requests_total", tenant="careful", tier="complex") == 1)
    labels = {"tenant": "careful", "tier": "complex"}
    assert world.metric("rt_tenant_cost_usd_total", **labels) == pytest.approx(answered["rt"]["cost_usd"])
    tokens = answered["usage"]
    assert world.metric("rt_tenant_tokens_total", direction="input", **labels) == tokens["prompt_tokens"]
    assert world.metric("rt_tenant_tokens_total", direction="output", **labels) == tokens["completion_tokens"]


def check_secrets(world: World) -> None:
    """After all of that, no key, card number or text is in any log, error, metric or state."""
    world.post("careful", CARD, max_tokens=-1)
    httpx.post(f"{world.stack.url}{CHAT_PATH}", json={"messages": []}, headers={"authorization": "Bearer rt-x"})
    page = httpx.get(f"{world.stack.url}/metrics", headers={"authorization": f"Bearer {world.keys['operator']}"})
    assert 'rt_quality_samples_total{tier="simple",verdict="poor"}' in page.text
    logs = {name: world.stack.log(name) for name in world.stack.facts["logs"]}
    assert all(logs.values()) and '"flagged"' in logs["triton"] and world.errors
    state = (world.folder / "run" / "quality.json").read_text()
    texts = [page.text, state, *world.pages, *world.errors, *logs.values()]
    for secret in (*world.keys.values(), KEY, CARD, "4111", NONSENSE, GOOD):
        assert not any(secret in text for text in texts), secret
    assert NONSENSE in (world.folder / "run" / "quality-cases.json").read_text()  # it would be found
