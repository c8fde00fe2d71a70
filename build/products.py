"""Folders made by commands of the container, kept in the cache by what they are made from.

A command writes into a folder beside its place, which gets the product's name only when the command has succeeded: a
killed build leaves nothing that looks finished, and the next one goes on after the last finished product. Its command
ends with it; should one of that command's own processes not, the next build waits for it. The name
ends in a hash over the command, its inputs' hashes and the versions, so nothing is ever reused for something else.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from build.errors import BuildError
from build.locks import lock

LOG_TAIL_LINES = 15
# Asks to be killed when its parent ends (PR_SET_PDEATHSIG, linux/prctl.h), and becomes the command. Not `preexec_fn`:
# that forks, which libraries with threads of their own, such as gRPC, do not survive.
_WITH_PARENT = "import ctypes, os, sys; ctypes.CDLL(None).prctl(1, 9); os.execvp(sys.argv[1], sys.argv[1:])"
CHECKOUT = Path(__file__).parents[1]


class Output(NamedTuple):
    """Stands for the folder that a command writes, in its words."""


class InCache(NamedTuple):
    """Stands for a path in the cache that helps a command and does not decide its result."""

    path: str


class Checkout(NamedTuple):
    """Stands for the folder that has the package `build`."""


class Python(NamedTuple):
    """Stands for the Python that builds."""


@dataclass(frozen=True)
class Product:
    """A folder in the cache: `name`, for people, and the `words` of the command that writes it.

    A word is a text, what one of the classes above stands for, or another product, which is made first. `versions` are
    those that decide the result, and `files` are patterns that must match something in it.
    """

    name: str
    words: tuple[str | Output | InCache | Checkout | Python | Product, ...]
    versions: Mapping[str, str]
    files: tuple[str, ...]

    @functools.cached_property
    def key(self) -> str:
        """sha256 over everything that decides the result; the same on every machine."""
        return hashlib.sha256(json.dumps(self.origin(), sort_keys=True).encode()).hexdigest()

    def origin(self) -> dict[str, Any]:
        """What decides the result: the command without this machine's paths, inputs by their keys, the versions."""
        words = [
            f"{word.name}-{word.key}" if isinstance(word, Product) else word if isinstance(word, str) else ""
            for word in self.words
        ]
        return {"name": self.name, "words": words, "versions": dict(self.versions)}

    def path(self, cache: Path) -> Path:
        """Where it is, or will be."""
        return cache / "products" / f"{self.name}-{self.key[:16]}"

    def parts(self) -> Iterator[Product]:
        """This product and all it is made from, in the order of making, each once."""
        seen: set[str] = set()
        yield from self._parts(seen)

    def _parts(self, seen: set[str]) -> Iterator[Product]:
        for word in self.words:
            if isinstance(word, Product):
                yield from word._parts(seen)
        if self.key not in seen:
            seen.add(self.key)
            yield self

    def command(self, cache: Path) -> list[str]:
        """The words as they are run; the output is beside its place."""
        return [self._word(word, cache) for word in self.words]

    def _word(self, word: str | Output | InCache | Checkout | Python | Product, cache: Path) -> str:
        if isinstance(word, Product):
            return str(word.path(cache))
        if isinstance(word, Output):
            return str(self._scratch(cache))
        if isinstance(word, Checkout):
            return str(CHECKOUT)
        if isinstance(word, Python):
            return sys.executable
        return str(cache / word.path) if isinstance(word, InCache) else word

    def _scratch(self, cache: Path) -> Path:
        path = self.path(cache)
        return path.with_name(f".{path.name}.tmp")

    def make(self, cache: Path) -> Path:
        """The finished folder; runs the command only if it is not there, and makes what it is made from first.

        Raises `BuildError` with the command's last lines. Everything it said is in the log beside the folder.
        """
        for word in self.words:
            if isinstance(word, Product):
                word.make(cache)
        path, scratch = self.path(cache), self._scratch(cache)
        path.parent.mkdir(parents=True, exist_ok=True)
        with lock(path.with_name(f".{path.name}.lock")) as held:
            if path.is_dir():
                return path
            shutil.rmtree(scratch, ignore_errors=True)  # what a killed build left
            for word in self.words:
                if isinstance(word, InCache):
                    (cache / word.path).parent.mkdir(parents=True, exist_ok=True)
            log = path.with_name(f"{path.name}.log")
            _run(self.command(cache), log, self.name, held)
            missing = [pattern for pattern in self.files if not list(scratch.glob(pattern))]
            if missing:
                raise BuildError(f"{self.name}: the command succeeded, but wrote no {', '.join(missing)}; see {log}")
            _origin_file(path).write_text(json.dumps(self.origin()), encoding="utf-8")
            os.rename(scratch, path)
        return path

    def why_missing(self, cache: Path) -> str:
        """Why it is not in the cache: never made, or made from something else; then the first difference."""
        path = self.path(cache)
        others = [_origin_file(each) for each in sorted(path.parent.glob(f"{self.name}-*")) if each.is_dir()]
        for file in others:
            if file.is_file():
                before, now = json.loads(file.read_bytes()), self.origin()
                changed = [pair for pair in zip(_flat(before), _flat(now)) if pair[0] != pair[1]]
                if changed:
                    return f"{path.name} is not in the cache; the one there has {changed[0][0]}, not {changed[0][1]}"
                return f"{path.name} is not in the cache; the one there was made by a longer or shorter command"
        return f"{path.name} is not in the cache"


def of_ours(module: str, *words: str | Output | InCache | Product) -> tuple[Any, ...]:
    """The words of a command that is a module of this package, which is found in the checkout alone."""
    return ("env", "-C", Checkout(), Python(), "-m", f"build.{module}", *words)


def as_script(products: Sequence[Product], cache: Path) -> str:
    """The commands of `products` as a shell script that does what `make` does, and can be run again after a failure."""
    lines, seen = [], set()
    for product in (part for each in products for part in each.parts()):
        if product.key in seen:
            continue
        seen.add(product.key)
        path, scratch = (shlex.quote(str(each)) for each in (product.path(cache), product._scratch(cache)))
        folders = [product.path(cache), *(cache / word.path for word in product.words if isinstance(word, InCache))]
        parents = sorted({str(each.parent) for each in folders})
        lines += [
            f"# {product.name}",
            f"if [ ! -d {path} ]; then",
            f"  mkdir -p {shlex.join(parents)}",
            f"  rm -rf {scratch}",
            f"  {shlex.join(product.command(cache))}",
            *(f"  compgen -G {scratch}/{shlex.quote(pattern)} >/dev/null" for pattern in product.files),
            f"  mv {scratch} {path}",
            "fi",
            "",
        ]
    return "\n".join(lines)


def _origin_file(path: Path) -> Path:
    return path.with_name(f"{path.name}.json")


def _flat(origin: Mapping[str, Any]) -> list[str]:
    """Each word with the one before it, so that a value comes with its flag; then the versions."""
    words = origin["words"]
    pairs = [f"{before} {word}" if before.startswith("--") else word for before, word in zip(["", *words], words)]
    return [*pairs, *(f"{name} {version}" for name, version in sorted(origin["versions"].items()))]


def with_parent(command: Sequence[str]) -> list[str]:
    """`command`, to be killed when who started it ends: a build that is killed leaves nobody writing."""
    return [sys.executable, "-IS", "-c", _WITH_PARENT, *command]


def _run(command: Sequence[str], log: Path, name: str, held: int) -> None:
    """Run `command`, which has the lock `held` too, so that nobody takes its folder while it writes."""
    if shutil.which(command[0]) is None:
        raise BuildError(f"{name}: {command[0]} is not on this machine; run the build inside the target's container")
    with log.open("wb") as sink:
        done = subprocess.run(
            with_parent(command),
            cwd=log.parent,  # in the cache: some tools leave files where they are started
            stdin=subprocess.DEVNULL,
            stdout=sink,
            stderr=sink,
            check=False,
            pass_fds=(held,),
        )
    if done.returncode:
        tail = "\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-LOG_TAIL_LINES:])
        raise BuildError(f"{name}: exit code {done.returncode}; all it said is in {log}; its last lines:\n{tail}")
