"""A model.py of the Triton model `orchestrator` whose store, if it is in its process, begins with what a file has."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

from orchestrator.triton.adapter import OrchestratorModel
from perf.cache_fillers import FILE_VARIABLE, fill


class FilledModel(OrchestratorModel):
    def __init__(self, args: dict[str, str]) -> None:
        super().__init__(args)
        if file := os.environ.get(FILE_VARIABLE):
            assert self._store is not None
            asyncio.run(fill(self._store, Path(file)))  # before anybody asks


class TritonPythonModel:
    def initialize(self, args: dict[str, str]) -> None:
        self._model = FilledModel(args)

    def execute(self, requests: list[Any]) -> None:
        self._model.execute(requests)

    def finalize(self) -> None:
        self._model.finalize()
