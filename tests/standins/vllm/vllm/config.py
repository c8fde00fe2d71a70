from __future__ import annotations

from dataclasses import dataclass


@dataclass
class StructuredOutputsConfig:
    backend: str = "auto"
