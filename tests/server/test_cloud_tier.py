"""A tier behind another API, through the gateway: OpenAI's client on one side, an API on loopback on the other."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import openai
import pytest
from fake_cloud import FakeCloud, Reply, answer, delta, fake_cloud
from serving import Stack, ask, running, script, wait_for

from build.compiler import build
from build.fetch import cache_folder
from build.rows import load_models, load_target

KEY = "sk-fake-90af31"
HERE = Path(__file__).parents[2]
TIER = """
[[tiers]]
name = "cloud"
model = "large"
context_window = 100000
input_price_per_million_tokens = 10.0
output_price_per_million_tokens = 100.0
generation = {{ max_output_tokens = 256 }}
[tiers.cloud]
base_url = "{url}"
model = "vendor/large-1"
key_env = "FAKE_CLOUD_KEY"
"""


@pytest.fixture(scope="module")
def cloud() -> Iterator[FakeCloud]:
    with fake_cloud() as cloud:
        yield cloud


@pytest.fixture(scope="module")
def stack(cloud: FakeCloud, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """Target scripted with one more tier."""
    folder = tmp_path_factory.mktemp("cloud")
    row = (HERE / "build" / "targets" / "scripted.toml").read_text(encoding="utf-8")
    (folder / "scripted.toml").write_text(row + TIER.format(url=cloud.url), encoding="utf-8")
    target = load_target("scripted", folder)
    build(target, load_models(target), folder / "artifact", cache=cache_folder(), progress=lambda _: nullcontext())
    with running(folder / "artifact", folder / "run", FAKE_CLOUD_KEY=KEY) as stack:
        yield stack
    for log in (folder / "run").glob("*.log"):
        assert KEY not in log.read_text(errors="replace"), log


@pytest.fixture
def client(stack: Stack, cloud: FakeCloud) -> Iterator[openai.OpenAI]:
    cloud.got.clear()
    cloud.num_left = 0
    with openai.OpenAI(base_url=f"{stack.url}/v1", api_key="none", max_retries=0, timeout=20) as client:
        yield client


@pytest.mark.parametrize("model", ["cloud", "large"])
def test_openais_client_is_answered_by_the_other_api(
    client: openai.OpenAI, stack: Stack, cloud: FakeCloud, model: str
) -> None:
    cloud.reply = Reply(answer("Grüße, ", "世界 💡"))
    whole = client.chat.completions.create(model=model, messages=ask("Hi"), max_tokens=5)  # type: ignore[arg-type]
    assert whole.choices[0].message.content == "Grüße, 世界 💡"
    assert (whole.model, whole.usage.prompt_tokens, whole.usage.completion_tokens) == ("large", 11, 2)
    chunks = list(
        client.chat.completions.create(
            model=model, messages=ask("Hi"), stream=True, stream_options={"include_usage": True}
        )
    )
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == "Grüße, 世界 💡"
    assert [chunk.usage.total_tokens for chunk in chunks if chunk.usage] == [13]
    assert [got.headers["authorization"] for got in cloud.got] == [f"Bearer {KEY}"] * 2
    assert [got.body["model"] for got in cloud.got] == ["vendor/large-1"] * 2
    assert cloud.got[0].body["max_tokens"] == 5


def test_it_is_a_model_like_the_others_and_they_are_served_as_before(client: openai.OpenAI, stack: Stack) -> None:
    assert {"cloud", "large", "simple", "llm_small"} <= {model.id for model in client.models.list()}
    assert stack.get("/ready").status_code == 200
    assert stack.stream(messages=script(text="One two.")).rt["tier"] == "simple"


def test_a_failure_names_the_tier_and_tells_no_key(client: openai.OpenAI, stack: Stack, cloud: FakeCloud) -> None:
    cloud.reply = Reply([f"no {KEY}".encode()], "500 Oops", "text/plain")
    with pytest.raises(openai.InternalServerError) as got:
        client.chat.completions.create(model="cloud", messages=ask("Hi"))  # type: ignore[arg-type]
    assert got.value.status_code == 502
    assert got.value.body == {
        "message": "tier 'cloud': the API answered 500",
        "type": "server_error",
        "param": None,
        "code": "cloud_error",
    }
    cloud.reply = Reply([delta("a"), delta("b"), delta("c")], end="cut")
    answered = stack.stream(model="cloud", messages=ask("Hi"))
    assert (answered.text, answered.finish_reason, answered.is_done) == ("abc", None, False)
    assert answered.error is not None and answered.error["code"] == "cloud_error"
    assert KEY not in json.dumps(answered.error)


def test_whoever_leaves_is_heard_there(stack: Stack, cloud: FakeCloud) -> None:
    """Case K06."""
    cloud.num_left, since = 0, stack.log_length()
    cloud.reply = Reply([delta(f"word{number} ") for number in range(40)], end="hang")
    connection = stack.send(model="cloud", stream=True, messages=ask("Hi"))
    received = b""
    while b"word39" not in received:
        received += connection.recv(65536)
    connection.close()
    wait_for(lambda: cloud.num_left == 1)
    # The line of the test before may come late: a call is settled after its caller has heard its end.
    (settled,) = wait_for(lambda: [line for line in stack.logged("request", since) if line["outcome"] == "cancelled"])
    assert (settled["tier"], settled["tokens"]) == ("cloud", 40)
    stack.wait_until_idle()
