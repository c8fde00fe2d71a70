"""Asking again beside live requests: who may be asked, what is dropped, what a restart keeps, what servers share."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cache_stores import run

from build.render import to_toml
from orchestrator.__main__ import main
from orchestrator.config import ConfigError, QualityPolicy, Tiers, load_tiers
from orchestrator.limits.gate import Gate
from orchestrator.limits.keys import Keyring, digest_of
from orchestrator.quality import FOLDER_VARIABLE, create_quality, create_store, fingerprints
from orchestrator.quality.cases import CASES_FILE, MAX_CASE_BYTES, MAX_CASES, Case, Cases, make_case, training_lines
from orchestrator.quality.clusters import Vector
from orchestrator.quality.monitor import Monitor, Sample, State
from orchestrator.quality.redis_store import RedisStore
from orchestrator.quality.sampler import MAX_PENDING, MAX_REQUEST_BYTES, Answered, Asked, Quality
from orchestrator.quality.store import STATE_FILE, FileStore, Store, read_state
from orchestrator.quality.vectors import PIECE_CHARACTERS, embed_whole

NAMES = ("simple", "medium", "complex", "expert")
POLICY = QualityPolicy(sampling=1.0, seed=1)
PRINTS = {"simple": "a", "medium": "b"}
SECRET = "the tenant's own words"


async def by_first_letter(text: str) -> Vector | None:
    """Texts are alike if they begin alike."""
    vector = np.zeros(32, np.float32)
    vector[ord(text[0]) % 32] = 1.0
    return vector


class World:
    """A sampler over answers that a test writes: `answers` by tier."""

    def __init__(self, *, store: Store | None = None, cases: Cases | None = None, **policy: Any) -> None:
        self.policy = POLICY.model_copy(update=policy)
        self.monitor = Monitor(self.policy, PRINTS)
        self.quality = Quality(self.policy, NAMES, self.monitor, by_first_letter, store=store, cases=cases)
        self.answers = {"simple": "good", "medium": "good", "expert": "good"}
        self.asked: list[str] = []
        self.hold: asyncio.Event | None = None

    def answered(self, text: str = "good", **fields: Any) -> Answered:
        given: dict[str, Any] = {
            "tier": "simple",
            "lifted_from": None,
            "tenant": "acme",
            "question": "why?",
            "text": text,
            "num_bytes": 100,
            "allowed": lambda name: True,
            "ask": self._ask,
        }
        return Answered(**{**given, **fields})

    async def _ask(self, tier: str) -> Asked:
        self.asked.append(tier)
        if self.hold is not None:
            await self.hold.wait()
        if tier not in self.answers:
            raise RuntimeError(SECRET)
        return Asked(self.answers[tier], 1000)

    async def until(self, condition: Callable[[], bool]) -> None:
        """Run until that is true."""
        running = asyncio.create_task(self.quality.run())
        deadline_s = time.monotonic() + 5
        while not condition():
            assert time.monotonic() < deadline_s, "waited in vain"
            await asyncio.sleep(0.005)
        running.cancel()
        await asyncio.wait({running})

    async def check(self, answered: Answered, times: int = 1) -> None:
        """As if it had been offered so often; then keep what came of it."""
        for _ in range(times):
            await self.quality.check(answered)
            await self.quality._receive()
        await self.quality._sync(must_save=True)

    def offer(self, *all_answered: Answered) -> None:
        for answered in all_answered:
            self.quality.offer(answered)

    @property
    def counts(self) -> dict[tuple[str, str], int]:
        return {key: num for key, num in self.monitor.samples.items() if num}


def test_an_answer_is_compared_to_the_experts(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "orchestrator.quality")

    async def check() -> None:
        world = World()
        world.offer(world.answered(), world.answered("nonsense"), world.answered("nothing", tier="medium"))
        await world.until(lambda: sum(world.counts.values()) == 3)
        assert world.counts == {("simple", "good"): 1, ("simple", "poor"): 1, ("medium", "poor"): 1}
        assert world.asked == ["expert"] * 3 and world.quality.nano_usd == 3000
        asked = [line for line in map(json.loads, caplog.messages) if line["event"] == "quality_asked"]
        assert asked == [{"event": "quality_asked", "tier": "expert", "cost_usd": 1e-6}] * 3

    asyncio.run(check())


def test_the_share_is_drawn_and_repeatable() -> None:
    def draw(seed: int | None) -> list[bool]:
        quality = World(sampling=0.05, seed=seed).quality
        return [quality.draw("simple", None) for _ in range(4000)]

    assert draw(7) == draw(7) != draw(8)
    assert 140 <= sum(draw(7)) <= 260
    quality = World().quality
    assert quality.draw("medium", None) and not quality.draw("complex", None) and not quality.draw("expert", None)
    assert quality.draw("complex", "medium")


def test_nothing_is_asked_that_is_not_allowed() -> None:
    world = World()
    world.offer(
        world.answered(allowed=lambda name: name != "expert"),
        world.answered(num_bytes=MAX_REQUEST_BYTES + 1),
        *(world.answered() for _ in range(MAX_PENDING + 3)),
    )
    assert {reason: num for reason, num in world.quality.dropped.items() if num} == {
        "not_allowed": 1,
        "too_long": 1,
        "full": 3,
    }
    assert world.asked == []


def test_while_one_hangs_the_others_are_dropped_and_nobody_waits() -> None:
    async def check() -> None:
        world = World()
        world.hold = asyncio.Event()
        running = asyncio.create_task(world.quality.run())
        started_s = time.monotonic()
        for _ in range(100):
            world.offer(world.answered())
            await asyncio.sleep(0)
        assert time.monotonic() - started_s < 1
        assert len(world.asked) == 1 and world.quality.dropped["full"] >= 100 - MAX_PENDING - 2
        running.cancel()  # the server stops: at once
        await asyncio.wait_for(asyncio.wait({running}), 1)

    asyncio.run(check())


def test_one_that_fails_is_counted_and_its_text_is_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    async def check() -> None:
        world = World()
        del world.answers["expert"]
        world.offer(world.answered())
        await world.until(lambda: world.quality.dropped["failed"] == 1)

        async def broken(text: str) -> None:
            return None

        world.quality._embed = broken
        world.answers["expert"] = "good"
        world.offer(world.answered())
        await world.until(lambda: world.quality.dropped["no_vector"] == 1)
        assert world.counts == {}

    with caplog.at_level(logging.INFO):
        asyncio.run(check())
    assert "quality_failed" in caplog.text and SECRET not in caplog.text


# --- lifted --------------------------------------------------------------------------------------------------


def test_of_a_lifted_question_the_doubtful_tier_is_asked_too_so_that_it_can_recover() -> None:
    async def check() -> None:
        world = World()
        for _ in range(60):
            world.monitor.add(Sample("simple", None, False, time.time()))
        assert world.quality.is_doubtful("simple")
        await world.check(world.answered(tier="medium", lifted_from="simple"), times=60)
        assert world.counts["simple", "good"] == 60
        assert world.asked[:2] == ["simple", "expert"] and world.counts["medium", "good"] == 60
        assert not world.quality.is_doubtful("simple")

    asyncio.run(check())


def test_a_question_lifted_to_the_expert_needs_no_other_answer_of_him() -> None:
    async def check() -> None:
        world = World()
        world.answers["medium"] = "different"
        world.offer(world.answered(tier="expert", lifted_from="medium"))
        await world.until(lambda: world.counts == {("medium", "poor"): 1})
        assert world.asked == ["medium"]

    asyncio.run(check())


# --- texts ---------------------------------------------------------------------------------------------------


def test_a_long_text_is_embedded_in_parts() -> None:
    lengths: list[int] = []

    async def embed(text: str) -> Vector | None:
        lengths.append(len(text))
        return None if len(text) > 300 else np.array([1.0, len(lengths) % 2], np.float32)

    vector = run(embed_whole(embed, "x" * (PIECE_CHARACTERS + 10)))
    assert vector is not None and np.linalg.norm(vector) == pytest.approx(1)
    assert lengths == [1000, 500, 250, 250, 500, 250, 250, 10]

    async def broken(text: str) -> Vector | None:
        return None

    assert run(embed_whole(broken, "some words")) is None
    assert run(embed_whole(embed, "  ")) is None


# --- cases ---------------------------------------------------------------------------------------------------

TURNS = [("developer", "Be brief."), ("user", SECRET)]


def test_text_is_kept_only_where_it_may_be_and_counts_only_in_doubt(tmp_path: Path) -> None:
    async def check() -> None:
        world = World(cases=Cases(tmp_path / CASES_FILE, 30), store=FileStore(tmp_path / STATE_FILE))
        world.answers["expert"] = "other"
        await world.check(world.answered())  # a tenant who does not keep text
        assert not (tmp_path / CASES_FILE).exists()
        await world.check(world.answered(turns=TURNS))
        (case,) = Cases(tmp_path / CASES_FILE, 30)._cases
        assert (case.label, case.counts, case.tenant) == ("medium", False, "acme")
        assert list(training_lines([case])) == []
        await world.check(world.answered(turns=TURNS), times=60)
        assert world.quality.is_doubtful("simple")

    asyncio.run(check())
    assert (tmp_path / CASES_FILE).stat().st_mode & 0o777 == 0o600
    (line,) = training_lines(Cases(tmp_path / CASES_FILE, 30)._cases)
    assert json.loads(line) == {
        "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": SECRET}],
        "tier": "medium",
        "domain": "quality",
    }
    assert SECRET not in (tmp_path / STATE_FILE).read_text()


def make(text: str = "q", at_s: float = 0.0, counts: bool = False) -> Case:
    case = make_case("acme", "simple", None, NAMES, [("user", text)], at_s)
    assert case is not None
    return case.model_copy(update={"counts": counts})


def test_text_of_a_key_that_is_gone_goes_too(tmp_path: Path) -> None:
    keyfile = tmp_path / "keys.json"
    key = {"id": "k", "tenant": "acme", "digest": digest_of("k")}
    keyfile.write_text(json.dumps({"keys": [{**key, "keep_text": True}]}))
    gate = Gate(Keyring(keyfile))

    async def check() -> None:
        quality = Quality(
            POLICY,
            NAMES,
            Monitor(POLICY, PRINTS),
            by_first_letter,
            cases=Cases(tmp_path / CASES_FILE, 30),
            clock=lambda: 1.0,
            may_keep=gate.may_keep_text,
        )
        quality._cases.add(make(SECRET))
        await quality._sync(must_save=True)
        assert SECRET in (tmp_path / CASES_FILE).read_text()
        for keys in ([key], []):  # no longer allowed; revoked
            keyfile.write_text(json.dumps({"keys": keys}))
            await quality._sync(must_save=True)
            assert SECRET not in (tmp_path / CASES_FILE).read_text()

    asyncio.run(check())


def test_cases_are_bounded_and_end() -> None:
    cases = Cases(None, keep_days=1)
    cases.add(make("x" * (MAX_CASE_BYTES + 1)))
    assert len(cases) == 0
    cases.add(make("first", counts=True))
    for number in range(MAX_CASES + 5):
        cases.add(make(str(number), at_s=100.0))
    assert len(cases) == MAX_CASES and cases._cases[0].counts
    cases.forget_old(86400.0 + 50)
    assert len(cases) == MAX_CASES - 1
    cases.forget_old(86400.0 + 100)
    assert len(cases) == 0


def test_only_labels_that_the_classifier_has_make_a_case() -> None:
    assert make_case("t", "expert", None, NAMES, [("user", "q")], 0.0) is None
    assert make_case("t", "small", None, ("small", "large"), [("user", "q")], 0.0) is None


# --- restarts ------------------------------------------------------------------------------------------------


def test_it_survives_a_restart(tmp_path: Path) -> None:
    async def check() -> None:
        world = World(store=FileStore(tmp_path / STATE_FILE))
        await world.check(world.answered("nonsense"), times=60)
        again = World(store=FileStore(tmp_path / STATE_FILE))
        await again.until(lambda: again.quality.is_doubtful("simple"))
        assert again.counts == {("simple", "poor"): 60}

    asyncio.run(check())
    assert (tmp_path / STATE_FILE).stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("text", ["", "{", "[]", '{"version": 2}', '{"version": 1, "tiers": {}, "x": 1}'])
def test_a_broken_file_is_told_and_all_begins_anew(tmp_path: Path, text: str, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / STATE_FILE).write_text(text)
    assert read_state(tmp_path / STATE_FILE) is None
    assert "quality is learnt anew" in caplog.text


def test_a_store_that_fails_is_counted_and_what_is_known_stays_here() -> None:
    class Broken(FileStore):
        async def share(self, sample: Sample) -> None:
            raise OSError(SECRET)

        async def load(self) -> State | None:
            raise OSError(SECRET)

    async def check() -> None:
        world = World(store=Broken(None))
        world.offer(world.answered())
        await world.until(lambda: world.counts == {("simple", "good"): 1})
        assert world.quality.num_store_errors == 2

    asyncio.run(check())


def test_two_servers_on_one_redis_know_the_same_and_a_third_goes_on(redis_url: str) -> None:
    async def check() -> None:
        prints = {**PRINTS, "simple": str(time.time())}
        worlds = [World(store=RedisStore(redis_url, prints, 1.0)) for _ in range(3)]
        for number in range(60):
            world = worlds[number % 2]
            await world.quality.check(world.answered("nonsense"))
        for world in worlds[:2]:
            await world.quality._sync(must_save=True)
            assert world.counts == {("simple", "poor"): 60} and world.quality.is_doubtful("simple")
        await worlds[0].quality.check(worlds[0].answered())
        third = worlds[2].quality
        await third._restore()
        assert worlds[2].counts == {("simple", "poor"): 60}
        await third._receive()
        assert worlds[2].counts == {("simple", "poor"): 60, ("simple", "good"): 1}
        for world in worlds:
            await world.quality._store.close()

    run(check())


# --- from the configuration ----------------------------------------------------------------------------------


def with_quality(artifact: Callable[[str], Path], **fields: Any) -> Tiers:
    tiers = load_tiers(artifact("scripted") / "tiers.toml")
    return Tiers(tier=tiers.tier, quality=QualityPolicy(**fields))


def test_without_a_table_there_is_none(artifact: Callable[[str], Path], tmp_path: Path) -> None:
    tiers = load_tiers(artifact("scripted") / "tiers.toml")
    assert create_quality(tiers, by_first_letter, {FOLDER_VARIABLE: str(tmp_path)}) is None
    assert create_quality(with_quality(artifact), by_first_letter, {}) is not None


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"expert": "best"}, "quality.expert: 'best' is no tier; one of simple, medium, complex, expert"),
        ({"tiers": ["expert"]}, "quality.tiers: 'expert' is not cheaper than 'expert'; allowed are simple, medium"),
        ({"tiers": ["simple", "x"], "expert": "medium"}, "'x' is not cheaper than 'medium'; allowed are simple"),
        ({"tiers": ["simple"], "expert": "simple"}, "allowed are none"),
    ],
)
def test_tiers_that_are_none(artifact: Callable[[str], Path], fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        with_quality(artifact, **fields)


def test_a_redis_address_that_is_none_is_not_told() -> None:
    with pytest.raises(ConfigError, match="REDIS_URL: its value is not allowed") as caught:
        create_store(POLICY, PRINTS, None, "http://:pass-word@host")
    assert "pass-word" not in str(caught.value)


def test_a_change_of_model_changes_the_fingerprint(artifact: Callable[[str], Path]) -> None:
    tiers = with_quality(artifact)
    assert tiers.quality is not None
    before = fingerprints(tiers.quality, tiers)
    other = tiers.model_copy(update={"tier": [tiers.tier[0].model_copy(update={"model": "x"}), *tiers.tier[1:]]})
    after = fingerprints(tiers.quality, other)
    assert before["simple"] != after["simple"] and before["medium"] == after["medium"]


# --- the command ---------------------------------------------------------------------------------------------


def test_status_and_cases(artifact: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tiers = with_quality(artifact)
    assert tiers.quality is not None
    written = to_toml(tiers.model_dump(mode="json", exclude_none=True))
    (tmp_path / "tiers.toml").write_text(written)
    assert load_tiers(tmp_path / "tiers.toml") == tiers
    monitor = Monitor(tiers.quality, fingerprints(tiers.quality, tiers))
    for number in range(160):
        monitor.add(Sample("simple", None, number < 100, time.time()))
    run(FileStore(tmp_path / STATE_FILE).save(monitor.state()))
    assert main(["quality", "status", str(tmp_path), f"--run-dir={tmp_path}"]) == 0
    output = capsys.readouterr().out
    assert "doubtful" in output and "simple: called for retraining 1 times" in output
    assert main(["quality", "status", str(tmp_path), f"--run-dir={tmp_path}", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["samples"]["simple"] == {"good": 100, "poor": 60}
    assert [row["is_doubtful"] for row in facts["records"]] == [True, False]
    cases = Cases(tmp_path / CASES_FILE, 30)
    cases.add(make(counts=True))
    file = cases.take_changes()
    assert file is not None
    cases.write(file)
    assert main(["quality", "cases", f"--run-dir={tmp_path}"]) == 0
    assert json.loads(capsys.readouterr().out)["tier"] == "medium"
    assert main(["quality", "status", str(artifact("scripted")), f"--run-dir={tmp_path}"]) == 1
    assert "no table [quality], so nothing is watched" in capsys.readouterr().err
