"""The tokenizer folder out of a Hugging Face checkpoint, after comparing the checkpoint with the model's row."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from build.errors import BuildError
from build.model_rows import ModelRow


def copy_tokenizer(checkpoint: Path, model: ModelRow, folder: Path) -> None:
    """Write tokenizer.json, chat_template.jinja and the two configurations of `checkpoint` into `folder`.

    Raises `BuildError` naming the first number in which the checkpoint is not the model of the row.
    """
    config, settings = _read_json(checkpoint / "config.json"), _read_json(checkpoint / "tokenizer_config.json")
    _check_config(config, model, checkpoint.name)
    folder.mkdir(parents=True)
    for name in ("tokenizer.json", "tokenizer_config.json", "config.json"):
        shutil.copyfile(checkpoint / name, folder / name)
    (folder / "chat_template.jinja").write_text(_chat_template(checkpoint, settings), encoding="utf-8")


def _check_config(config: dict[str, Any], model: ModelRow, name: str) -> None:
    numbers = model.architecture
    expected = {
        "model_type": numbers.family,
        "num_hidden_layers": numbers.num_layers,
        "hidden_size": numbers.hidden_size,
        "intermediate_size": numbers.intermediate_size,
        "num_attention_heads": numbers.num_attention_heads,
        "num_key_value_heads": numbers.num_kv_heads,
        "vocab_size": numbers.vocab_size,
        "max_position_embeddings": numbers.context_window,
        "rope_theta": numbers.rope_theta,
        "rms_norm_eps": numbers.rms_norm_eps,
        "tie_word_embeddings": numbers.tie_word_embeddings,
    }
    for key, value in expected.items():
        if config.get(key) != value:
            raise BuildError(
                f"{name}/config.json: {key} is {config.get(key)!r}, the row of {model.name!r} says {value!r}; "
                "fix the row"
            )


def _chat_template(checkpoint: Path, settings: dict[str, Any]) -> str:
    """From its own file, as newer checkpoints have it, or from tokenizer_config.json: one, or a list with a default."""
    file = checkpoint / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    template = settings.get("chat_template")
    if isinstance(template, list):
        template = next((each["template"] for each in template if each["name"] == "default"), None)
    if not isinstance(template, str):
        raise BuildError(
            f"{checkpoint.name}: no chat template, neither chat_template.jinja nor in tokenizer_config.json"
        )
    return template


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content: dict[str, Any] = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise BuildError(f"{path}: not a JSON file that can be read: {error}") from error
    return content
