"""`python -m build router`: train the classifier's adapter from `data/router.jsonl`, and judge it out of fold.

With `--add`, train it again with cases of the quality monitor (`build.router_cases`).
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import platform
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from build import router_adapter, router_data
from build.e5_file import read_e5
from build.errors import BuildError
from build.fetch import cache_folder, fetch, sha256
from build.model_rows import ComplexityRow
from build.router_adapter import Adapter, Floats, read_adapter, write_adapter
from build.router_cases import compare, keep_cases, read_cases, read_kept, roll_back, take_over
from build.router_data import Labelled, assign_folds, read_labelled
from build.router_scores import choose_temperature, score, soft_max
from build.rows import HERE
from build.unigram_tokenizer import write_unigram
from orchestrator.config import read_toml
from orchestrator.routing.complexity import TIERS
from orchestrator.routing.conversation import ConversationReader

if TYPE_CHECKING:
    from build.router_training import Encoder, Settings, Trainer

REPORT = HERE.parent / "perf" / "results" / "router-oof.json"
_TOOLS = ("jax", "numpy", "optax", "tokenizers")


def run_router(argv: list[str]) -> int:
    """Run the command; returns its exit code. Raises `BuildError`."""
    parser = argparse.ArgumentParser(
        prog="python -m build router",
        description="Train the classifier behind the model `complexity`. Needs the extra `router`.",
    )
    parser.add_argument("--data", type=Path, default=router_data.PATH, metavar="FILE", help="labelled conversations")
    parser.add_argument("--output", type=Path, default=router_adapter.PATH, metavar="FILE", help="the adapter")
    parser.add_argument("--report", type=Path, default=REPORT, metavar="FILE", help="the out-of-fold report")
    parser.add_argument(
        "--folds",
        type=int,
        default=5,
        help="parts for the out-of-fold report and the temperature; 0: keep those of the present adapter (default: 5)",
    )
    parser.add_argument("--epochs", type=int, help="rounds over the data (default: what the settings say)")
    parser.add_argument(
        "--add",
        type=Path,
        nargs="+",
        metavar="FILE",
        help="train with these cases too (`python -m orchestrator quality cases`); takes over only if it is better",
    )
    parser.add_argument("--rollback", action="store_true", help="go back to the adapter before the last --add")
    arguments = parser.parse_args(argv)
    if arguments.rollback:
        roll_back(arguments.output)
        print(f"{arguments.output}: the one before; now: python -m build --target cpu")
        return 0
    if arguments.folds == 1 or arguments.folds < 0:
        parser.error(f"--folds {arguments.folds}: 0, or at least 2")
    if arguments.epochs is not None and arguments.epochs < 1:
        parser.error(f"--epochs {arguments.epochs}: at least 1")
    try:
        from build.router_training import Settings
    except ImportError as error:
        raise BuildError(
            f"training needs {error.name}, which is not installed; pip install -c constraints.txt -e '.[cpu,router]'"
        ) from error
    settings = Settings() if arguments.epochs is None else Settings(num_epochs=arguments.epochs)
    if arguments.add:
        _retrain(arguments.add, arguments.data, arguments.output, settings)
    else:
        _train(arguments.data, arguments.output, arguments.report, arguments.folds, settings)
    return 0


def _train(data: Path, output: Path, report: Path, num_folds: int, settings: Settings) -> None:
    from build.router_training import Trainer

    rows = read_labelled(data)
    origin = _origin(data, rows, settings)
    kept = None if num_folds else _keep(output, origin)
    encoder, sequences = _prepare(rows)
    labels = np.array([row.label for row in rows])
    trainer = Trainer(encoder, settings)
    judged = kept or _judge_folds(trainer, sequences, labels, rows, num_folds, settings)
    if kept is None:
        report.parent.mkdir(parents=True, exist_ok=True)
        report.write_text(json.dumps({**origin, **judged}, indent=2) + "\n", encoding="utf-8")
    say = _progress("all rows", settings)
    tensors = trainer.train(sequences, labels.tolist(), say)
    write_adapter(Adapter(tensors, {**origin, **judged}), output)
    print(f"{output}: {output.stat().st_size / 1e6:.1f} MB; now: python -m build --target cpu")


def _keep(output: Path, origin: dict[str, Any]) -> dict[str, Any]:
    """Temperature and report of the adapter at `output`, which must have come of the same data and settings."""
    training = read_adapter(output).training
    for key in ("data_sha256", "settings"):
        if "folds" not in training or training.get(key) != origin[key]:
            raise BuildError(f"--folds 0: {output} was trained with another {key}; train with --folds 5")
    return {key: training[key] for key in ("temperature", "folds", "out_of_fold", "tiers")}


def _retrain(files: Sequence[Path], data: Path, output: Path, settings: Settings) -> None:
    from build.router_training import Trainer

    in_use = read_adapter(output) if output.exists() else None
    kept = read_kept(in_use, output)
    before = [*read_labelled(data), *kept]
    cases = read_cases(files, before)
    rows = [*before, *cases]
    encoder, sequences = _prepare(rows)
    trainer = Trainer(encoder, settings)
    found = compare(
        trainer,
        sequences,
        rows,
        len(before),
        settings.seed,
        partial(_progress, settings=settings),
        None if in_use is None else in_use.tensors,
    )
    print(f"{len(cases)} cases; {found.describe()}")
    if not found.is_better:
        print(f"{output}: stays as it is")
        return
    tensors = trainer.train(sequences, [row.label for row in rows], _progress("all rows", settings))
    training = {
        **_origin(data, rows, settings),
        "added_sha256": [sha256(file) for file in files],
        "cases": keep_cases([*kept, *cases], output),
        "temperature": found.temperature,
        "held_out": found.new.rounded(),
        "tiers": list(TIERS),
    }
    take_over(Adapter(tensors, training), output)
    print(f"{output}: taken over; now: python -m build --target cpu (and --rollback goes back)")


def _origin(data: Path, rows: Sequence[Labelled], settings: Settings) -> dict[str, Any]:
    """What an adapter was trained from."""
    return {
        "data_sha256": sha256(data),
        "rows": len(rows),
        "settings": dataclasses.asdict(settings),
        "versions": {tool: metadata.version(tool) for tool in _TOOLS} | {"python": platform.python_version()},
    }


def _prepare(rows: Sequence[Labelled]) -> tuple[Encoder, list[npt.NDArray[np.int32]]]:
    """The frozen encoder with the words in use alone, and each row's ids as places in that table."""
    from build.router_training import Encoder

    model = read_toml(HERE / "models" / "complexity.toml", ComplexityRow)
    file = read_e5(fetch(model.weights, cache_folder()))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "tokenizer.json"
        write_unigram(file.pieces, path)
        reader = ConversationReader(path)
        sequences = [reader.read(row.turns) for row in rows]
    used, places = np.unique(np.concatenate(sequences), return_inverse=True)
    ends = np.cumsum([len(sequence) for sequence in sequences])[:-1]
    numbers = model.architecture
    encoder = Encoder(file.words.rows(used), file.weights, numbers.num_attention_heads, numbers.layer_norm_eps)
    return encoder, np.split(places.astype(np.int32), ends)


def _judge_folds(
    trainer: Trainer,
    sequences: Sequence[npt.NDArray[np.int32]],
    labels: npt.NDArray[np.int64],
    rows: Sequence[Labelled],
    num_folds: int,
    settings: Settings,
) -> dict[str, Any]:
    """Each row judged by a model that saw nothing of its group; the temperature that fits them all."""
    folds = assign_folds(rows, num_folds, settings.seed)
    logits: Floats = np.zeros((len(rows), len(TIERS)), np.float32)
    for fold in range(num_folds):
        taught, left = np.flatnonzero(folds != fold), np.flatnonzero(folds == fold)
        say = _progress(f"fold {fold + 1} of {num_folds}", settings)
        tensors = trainer.train([sequences[row] for row in taught], labels[taught].tolist(), say)
        logits[left] = trainer.predict(tensors, [sequences[row] for row in left])
    return summarise(logits, labels, folds)


def summarise(logits: Floats, labels: npt.NDArray[np.int64], folds: npt.NDArray[np.int64]) -> dict[str, Any]:
    """What the adapter's metadata says of out-of-fold numbers [rows, tiers].

    The temperature of a fold, for its calibration error, is chosen on the others; the adapter's on all.
    """
    probabilities = np.zeros(logits.shape, np.float64)
    for fold in np.unique(folds):
        others, own = folds != fold, folds == fold
        probabilities[own] = soft_max(logits[own], choose_temperature(logits[others], labels[others]))
    return {
        "temperature": choose_temperature(logits, labels),
        "folds": int(folds.max()) + 1,
        "out_of_fold": score(probabilities, labels).rounded(),
        "tiers": list(TIERS),
    }


def _progress(what: str, settings: Settings) -> Callable[[int, float], None]:
    """Prints a line for each epoch."""
    started = time.monotonic()

    def say(epoch: int, loss: float) -> None:
        seconds = time.monotonic() - started
        print(f"  {what:<14} epoch {epoch} of {settings.num_epochs}  loss {loss:.3f}  {seconds:7.0f} s", flush=True)

    return say
