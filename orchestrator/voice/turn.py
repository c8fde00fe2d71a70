"""smart-turn: whether a person who fell silent is done, or will go on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from orchestrator.onnx_session import open_session
from orchestrator.voice.mel import NUM_SAMPLES, Floats, log_mel


class TurnDetector:
    """Looks at the last 8 s of what a person has said in this turn, the silence at its end included."""

    def __init__(self, model: Path, *, num_threads: int) -> None:
        self._session: Any = open_session(model, num_threads=num_threads)

    def judge(self, audio: Floats) -> float:
        """FP32 [samples] at 16 kHz -> how probably he is done. A shorter turn has silence put before it."""
        recent = audio[-NUM_SAMPLES:]
        recent = np.pad(recent, (NUM_SAMPLES - len(recent), 0))
        (probabilities,) = self._session.run(None, {"input_features": log_mel(recent)[None]})
        return float(probabilities.reshape(-1)[0])
