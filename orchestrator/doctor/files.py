"""The files of an artifact against its manifest.

Every start compares names and sizes of all files and the sha256 of the small ones. A large file is read once: what was
seen to be right is written down (`Verified`) with the facts that the system changes on every write, and as long as they
are the same, it is taken as read. `python -m orchestrator doctor` reads all of them.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import shlex
from collections.abc import Iterator
from pathlib import Path

from orchestrator.doctor.findings import Finding
from orchestrator.manifest import MANIFEST, Manifest

# Reading this much takes 10 ms; an engine has thousands of times as much.
LARGE_BYTES = 16 << 20
CHECK = "files"


class Verified:
    """Which large files had their sha256 when they were last read: by path, with inode, size, mtime and ctime.

    It lives in the user's cache, not in the artifact, which may be read-only. Without a place it remembers nothing.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._known: dict[str, list[int | str]] = {}
        if path is not None:
            try:
                self._known = dict(json.loads(path.read_bytes()))
            except (OSError, ValueError, TypeError):
                self._known = {}

    @classmethod
    def of_user(cls) -> Verified:
        """The one of who runs this process."""
        folder = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        return cls(Path(folder, "triton-realtime", "verified.json"))

    def has(self, path: Path, sha256: str) -> bool:
        return self._known.get(str(path)) == _facts(path, sha256)

    def add(self, path: Path, sha256: str) -> None:
        self._known[str(path)] = _facts(path, sha256)

    def forget(self, root: Path) -> None:
        """Have every file below `root` read again."""
        self._known = {path: facts for path, facts in self._known.items() if not path.startswith(f"{root}/")}

    def save(self) -> None:
        """Write it down; where that cannot be, the files are read again next time."""
        if self._path is None:
            return
        draft = self._path.with_name(f"{self._path.name}.{secrets.token_hex(4)}")
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            draft.write_text(json.dumps(self._known), encoding="utf-8")
            draft.replace(self._path)
        except OSError:
            return


def _facts(path: Path, sha256: str) -> list[int | str]:
    # ctime is the system's own: a file cannot be written, nor another put in its place, and keep it.
    stat = path.stat()
    return [sha256, stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns]


def find_file_faults(root: Path, manifest: Manifest, verified: Verified | None = None) -> Iterator[Finding]:
    """Each file that is missing, changed, or there without being in the manifest: Triton loads whatever lies there.

    With `verified` a large file that it knows is not read; it learns of those that are.
    """
    for name, built in sorted(manifest.files.items()):
        path = root / name
        if not path.is_file():
            fix = f"copy it again, or {manifest.rebuild}"
            yield Finding(CHECK, f"{path}: in {MANIFEST}, but missing", f"{built.bytes} bytes, as built", fix)
        elif (size := path.stat().st_size) != built.bytes:
            yield Finding(
                CHECK,
                f"{path}: changed since the build, or copied in part: {size} bytes",
                f"{built.bytes} bytes",
                f"copy it again, or {manifest.rebuild}",
            )
        elif not _is_right(path, built.sha256, size, verified):
            yield Finding(
                CHECK,
                f"{path}: changed since the build (its sha256 differs from {MANIFEST})",
                f"sha256 {built.sha256}",
                f"copy it again, or {manifest.rebuild}",
            )
    for name in _files_below(root):
        if name not in manifest.files:
            yield Finding(
                CHECK,
                f"{root / name}: not in {MANIFEST}, so it is not part of what was built",
                "nothing beside what was built: Triton loads it",
                f"rm {shlex.quote(str(root / name))}, or {manifest.rebuild}",
            )


def _is_right(path: Path, sha256: str, size: int, verified: Verified | None) -> bool:
    if verified is None or size < LARGE_BYTES:
        return _sha256(path) == sha256
    if not verified.has(path, sha256):
        if _sha256(path) != sha256:
            return False
        verified.add(path, sha256)
    return True


def _files_below(root: Path) -> Iterator[str]:
    """Relative paths of what must be in the manifest. Python's caches appear when Triton runs a model."""
    for path in sorted(root.rglob("*")):
        name = path.relative_to(root)
        if name != Path(MANIFEST) and "__pycache__" not in name.parts and not path.is_dir():
            yield name.as_posix()


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()
