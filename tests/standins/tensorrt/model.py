"""A Python-based Triton backend under the name of NVIDIA's `tensorrt`, for machines without a GPU.

It refuses every configuration and request that NVIDIA's would refuse (`standins/plans.py`), and computes the rest by
ONNX Runtime, from `model.onnx` beside the plan: each request by itself, since in a graph of INT8 neighbours share a
scale, which they do not in a plan of FP16. The plan is `plan.json`'s text; the configuration as it was rendered is
in `rendered.json`, since Triton itself takes no instances on GPUs where there are none.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np
import triton_python_backend_utils as pb_utils
from standins import plans

from orchestrator.onnx_session import open_session


class TritonPythonModel:
    """What Triton loads."""

    def initialize(self, args: dict[str, str]) -> None:
        folder = Path(args["model_repository"], args["model_version"])
        self._plan: dict[str, Any] = json.loads((folder / plans.FILE).read_bytes())
        rendered = json.loads((folder / "rendered.json").read_bytes())
        if fault := plans.find_config_fault(rendered, self._plan):
            raise pb_utils.TritonModelException(fault)
        self._instance = args["model_instance_name"]
        self._most = int(rendered["max_batch_size"])
        self._session = open_session(folder / "model.onnx", num_threads=1, keep_memory=False)

    def execute(self, requests: list[Any]) -> list[Any]:
        names = [each["name"] for each in self._plan["inputs"]]
        given = [{tensor.name(): tensor.as_numpy() for tensor in request.inputs()} for request in requests]
        if any(set(each) != set(names) for each in given):
            return [_error(f"inputs for {self._instance} are {names}") for _ in requests]
        feeds = {name: np.concatenate([each[name] for each in given]) for name in names}
        if fault := plans.find_request_fault(self._instance, feeds, self._plan, self._most):
            return [_error(fault) for _ in requests]
        outputs = [each["name"] for each in self._plan["outputs"]]
        return [
            pb_utils.InferenceResponse(
                [pb_utils.Tensor(name, array) for name, array in zip(outputs, self._session.run(outputs, each))]
            )
            for each in given
        ]


def _error(message: str) -> Any:
    return pb_utils.InferenceResponse(error=pb_utils.TritonError(message))
