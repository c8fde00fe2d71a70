"""API keys: the file, the command that changes it, and whose key a call came with."""

from __future__ import annotations

import json
import os
import re
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.__main__ import main
from orchestrator.config import ConfigError
from orchestrator.errors import UnauthorizedError
from orchestrator.limits import create_gate
from orchestrator.limits.keys import KEYS_VARIABLE, Keyring, change_keys, digest_of, new_secret, read_keys


def write(path: Path, *keys: dict[str, object]) -> None:
    path.write_text(json.dumps({"keys": keys}))


def row(secret: str, **fields: object) -> dict[str, object]:
    return {"id": "a", "tenant": "acme", "digest": digest_of(secret), **fields}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "keys.json"


def keys_command(*arguments: object) -> int:
    return main(["keys", *map(str, arguments)])


# --- the command ---------------------------------------------------------------------------------------------


def test_a_key_is_shown_once_and_stored_as_a_digest(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert keys_command("add", "--keys", path, "--tenant", "acme", "--tier", "simple", "--usd-per-day", "1.5") == 0
    secret = capsys.readouterr().out.strip()
    assert re.fullmatch(r"rt-[A-Za-z0-9_-]{43}", secret)  # 256 bits
    assert secret not in path.read_text() and secret[3:20] not in path.read_text()
    assert path.stat().st_mode & 0o777 == 0o600
    (key,) = read_keys(path).keys
    assert (key.id, key.tenant, key.tiers, key.usd_per_day) == ("acme-1", "acme", ("simple",), 1.5)
    assert key.digest == digest_of(secret)
    assert keys_command("list", "--keys", path) == 0
    listed = capsys.readouterr().out
    assert "acme-1  acme    simple" in listed and key.digest not in listed
    assert keys_command("revoke", "--keys", path, "acme-1") == 0
    assert read_keys(path).keys == ()


def test_secrets_differ() -> None:
    assert len({new_secret() for _ in range(100)}) == 100


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["revoke", "nobody"], "no key 'nobody'; there are acme-1"),
        (["add", "--tenant", "acme", "--id", "acme-1"], "--id: 'acme-1' is there already"),
        (["add", "--tenant", "a b"], "--tenant: String should match pattern"),
        (["add", "--tenant", "b", "--tokens-per-minute", "0"], "--tokens-per-minute: Input should be greater than 0"),
        (["add", "--tenant", "b", "--usd-per-day", "-1"], "--usd-per-day: Input should be greater than 0"),
        (
            ["add", "--tenant", "b", "--usd-per-day", "1e-12"],
            "--usd-per-day: must be at least 0.000000001, the least that is counted (got 1e-12)",
        ),
        (["add", "--tenant", "b", "--usd-per-day", "nan"], "--usd-per-day: "),
        (["add", "--tenant", "b", "--deadline-ms", "99999999"], "--deadline-ms: Input should be less than or equal"),
    ],
)
def test_a_wrong_order_is_named_and_changes_nothing(
    path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    keys_command("add", "--keys", path, "--tenant", "acme")
    before = path.read_bytes()
    capsys.readouterr()
    assert keys_command(arguments[0], "--keys", path, *arguments[1:]) == 1
    out, err = capsys.readouterr()
    assert message in err and out == ""
    assert path.read_bytes() == before and os.listdir(path.parent) == [path.name]


def test_a_tier_that_does_not_exist_is_refused_or_warned_of(
    path: Path, artifact: Callable[[str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    add = ("add", "--keys", path, "--tenant", "acme", "--tier", "simple", "--tier", "embedding")
    served = artifact("scripted")
    assert keys_command(*add, "--tier", "nosuch", "--artifact", served) == 1
    out, err = capsys.readouterr()
    known = "simple, medium, complex, expert, embedding, ocr, stt, tts"
    assert f"--tier: 'nosuch' is no tier of {served}; one of {known}" in err and out == "" and not path.exists()
    assert keys_command(*add, "--artifact", served) == keys_command(*add) == 0
    assert "warning" not in capsys.readouterr().err
    assert keys_command(*add, "--tier", "nosuch") == 0  # perhaps it is somebody's
    out, err = capsys.readouterr()
    assert "warning: --tier: 'nosuch' is none of the usual" in err and "--artifact" in err
    assert out.startswith("rt-") and len(out.splitlines()) == 1
    assert keys_command(*add, "--artifact", path.parent / "none") == 1


def test_what_a_tenant_allows_is_off_unless_said_and_listed(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    keys_command("add", "--keys", path, "--tenant", "quiet")
    flags = ("--allow-cloud-sampling", "--keep-text", "--hold-flagged", "--metrics")
    keys_command("add", "--keys", path, "--tenant", "open", *flags)
    quiet, open_ = read_keys(path).keys
    assert not (quiet.allow_cloud_sampling or quiet.keep_text or quiet.hold_flagged or quiet.may_read_metrics)
    assert open_.allow_cloud_sampling and open_.keep_text and open_.hold_flagged and open_.may_read_metrics
    capsys.readouterr()
    keys_command("list", "--keys", path)
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].endswith("-") and lines[2].endswith("metrics,allow-cloud-sampling,keep-text,hold-flagged")


def test_a_file_that_is_not_there(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert keys_command("list", "--keys", path) == 1
    assert "cannot be read: No such file" in (err := capsys.readouterr().err)
    assert "fix: python -m orchestrator keys add" in err


def test_two_who_add_at_once_lose_nothing(path: Path) -> None:
    threads = [
        threading.Thread(target=keys_command, args=("add", "--keys", path, "--tenant", "acme")) for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(key.id for key in read_keys(path).keys) == [f"acme-{number}" for number in range(1, 9)]


# --- the file ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([row("x", tenants="b")], "keys.0.tenants: no such key; is it tenant?"),
        ([row("x", digest="ABC")], "keys.0.digest: String should match pattern"),
        ([row("x", requests_per_minute="5")], "keys.0.requests_per_minute: Input should be a valid integer"),
        ([row("x", tokens_per_minute=1.5)], "keys.0.tokens_per_minute"),
        ([row("x", priority="urgent")], "keys.0.priority: Input should be 'interactive' or 'batch'"),
        ([row("x", tiers=[])], "keys.0.tiers"),
        ([row("x"), row("y")], "keys.id: 'a' is used 2 times"),
        ([row("x"), row("x", id="b")], "keys.digest: "),
    ],
)
def test_a_wrong_file_is_explained(path: Path, rows: list[dict[str, object]], message: str) -> None:
    write(path, *rows)
    with pytest.raises(ConfigError, match=re.escape(message)) as caught:
        read_keys(path)
    assert str(path) in str(caught.value)


def test_a_change_that_fails_leaves_the_file(path: Path) -> None:
    write(path, row("x"))
    before = path.read_bytes()
    with pytest.raises(ZeroDivisionError):
        change_keys(path, lambda file: 1 / 0)  # type: ignore[arg-type, return-value]
    assert path.read_bytes() == before


# --- whose key -----------------------------------------------------------------------------------------------


def test_who_has_the_key_is_known_and_nobody_else(path: Path) -> None:
    write(path, row("rt-one"), row("rt-two", id="b", tenant="other"))
    keyring = Keyring(path)
    assert keyring.find("Bearer rt-one").tenant == "acme"
    assert keyring.find("bearer   rt-two ").tenant == "other"
    for wrong in (
        None,
        "",
        "Bearer \ud800",
        "Bearer \udcff",
        "rt-one",
        "Bearer",
        "Bearer ",
        "Basic rt-one",
        "Bearer rt-on",
        "Bearer rt-one x",
    ):
        with pytest.raises(UnauthorizedError) as caught:
            keyring.find(wrong)
        assert "rt-on" not in caught.value.message


@given(st.text() | st.text().map("Bearer {}".format) | st.text().map("Bearer rt-{}".format))
def test_no_other_text_is_anybody(tmp_path_factory: pytest.TempPathFactory, authorization: str) -> None:
    path = tmp_path_factory.getbasetemp() / "property-keys.json"
    if not path.exists():
        write(path, row(new_secret()))
    with pytest.raises(UnauthorizedError):
        Keyring(path).find(authorization)


def test_a_change_counts_at_once_and_a_broken_file_changes_nothing(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write(path, row("rt-one"), row("rt-two", id="b"))
    keyring = Keyring(path)
    change_keys(path, lambda file: file.model_copy(update={"keys": file.keys[1:]}))
    with pytest.raises(UnauthorizedError):
        keyring.find("Bearer rt-one")
    path.write_text('{"keys": [')
    assert keyring.find("Bearer rt-two").id == "b"
    assert keyring.find("Bearer rt-two").id == "b"
    assert [record.levelname for record in caplog.records].count("ERROR") == 1
    path.unlink()
    assert keyring.find("Bearer rt-two").id == "b"
    write(path, row("rt-three"))
    assert keyring.find("Bearer rt-three").id == "a"
    with pytest.raises(UnauthorizedError):
        keyring.find("Bearer rt-two")


def test_an_address_of_a_store_that_is_none_is_not_shown(path: Path) -> None:
    write(path)
    with pytest.raises(ConfigError, match="REDIS_URL: its value is not allowed") as caught:
        create_gate({KEYS_VARIABLE: str(path), "REDIS_URL": "http://:secret@host"})
    assert "secret" not in str(caught.value) and caught.value.__cause__ is None
