"""The tokenizer and chat template of every tier: there, and those of the tier's model."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from orchestrator.config import ConfigError, Tier, load_tiers
from orchestrator.doctor.findings import Finding
from orchestrator.manifest import Manifest

CHECK = "tokenizer"
FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
# Tables are padded to a multiple of some power of two for the GPU: by 399 tokens in Qwen2.5's.
MAX_PADDING = 1024


def check_tokenizers(root: Path, manifest: Manifest) -> Iterator[Finding]:
    """A finding for each tokenizer, or for each of its faults."""
    try:
        tiers = load_tiers(root / "tiers.toml").tier
    except ConfigError as error:
        yield Finding(CHECK, str(error), "tiers as the build wrote them", manifest.rebuild)
        return
    for tier in {tier.tokenizer: tier for tier in tiers if tier.tokenizer is not None}.values():
        yield from _find_faults(root, manifest, tier) or [Finding(CHECK, f"{tier.model}: tokenizer and chat template")]


def _find_faults(root: Path, manifest: Manifest, tier: Tier) -> list[Finding]:
    folder = root / (tier.tokenizer or "")
    missing = [name for name in FILES if not (folder / name).is_file() or not (folder / name).stat().st_size]
    if missing:
        return [Finding(CHECK, f"{folder / name}: missing or empty", "a file", manifest.rebuild) for name in missing]
    try:
        ids = _read_ids(json.loads((folder / "tokenizer.json").read_bytes()))
        settings = json.loads((folder / "tokenizer_config.json").read_bytes())
        eos = settings.get("eos_token")
        eos = eos["content"] if isinstance(eos, dict) else eos
        if not isinstance(eos, str | None) or not all(isinstance(number, int) for number in ids.values()):
            raise TypeError("eos_token is no text, or an id is no number")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return [Finding(CHECK, f"{folder}: not a tokenizer: {error!r}", "what the build wrote", manifest.rebuild)]
    return list(_find_mismatches(folder, manifest, tier, ids, eos))


def _read_ids(tokenizer: dict[str, Any]) -> dict[str, int]:
    """Token ids by their text. A unigram model's vocabulary is a list."""
    vocab = tokenizer["model"]["vocab"]
    ids = dict(vocab) if isinstance(vocab, dict) else {text: number for number, (text, _) in enumerate(vocab)}
    return ids | {token["content"]: token["id"] for token in tokenizer.get("added_tokens", [])}


def _find_mismatches(
    folder: Path, manifest: Manifest, tier: Tier, ids: dict[str, int], eos: str | None
) -> Iterator[Finding]:
    settings = manifest.row.models.get(tier.model)
    architecture = manifest.find_architecture(settings)
    num_tokens = max(ids.values(), default=-1) + 1
    if architecture is not None:
        size = architecture.vocab_size
        if not size - MAX_PADDING < num_tokens <= size:
            yield Finding(
                CHECK,
                f"{folder}: the tokenizer of another model: it has {num_tokens} tokens",
                f"{size}, those of {settings.model if settings else tier.model}",
                manifest.rebuild,
            )
            return
    if eos is not None and ids.get(eos) != tier.end_id:
        yield Finding(
            CHECK,
            f"{folder}: the tokenizer of another model: its answers end with {eos!r}, id {ids.get(eos)}",
            f"id {tier.end_id}, the engine's",
            manifest.rebuild,
        )
