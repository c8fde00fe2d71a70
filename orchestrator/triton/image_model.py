"""The Triton model `image_preprocess` on the python backend."""

from __future__ import annotations

from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils

from orchestrator import contracts
from orchestrator.errors import ApiError
from orchestrator.triton.tensors import input_of, to_triton_error
from orchestrator.vision.images import read_image
from orchestrator.vision.sizes import PADDING, choose_sides


class ImagePreprocessModel:
    """What `image_preprocess`'s model.py delegates to."""

    def execute(self, requests: list[Any]) -> list[Any]:
        return [self._answer(request) for request in requests]

    def _answer(self, request: Any) -> Any:
        try:
            pictures = [read_image(data) for data in input_of(request, contracts.IMAGE).reshape(-1)]
        except ApiError as error:
            return pb_utils.InferenceResponse(error=to_triton_error(error))
        shown = [picture.pixels.shape[1::-1] for picture in pictures]
        width, height = choose_sides(*(max(sides) for sides in zip(*shown)))
        pixels = np.full((len(pictures), height, width, 3), PADDING, np.uint8)
        sizes = np.zeros((len(pictures), 4), np.int32)
        for index, (picture, (shown_width, shown_height)) in enumerate(zip(pictures, shown)):
            pixels[index, :shown_height, :shown_width] = picture.pixels
            sizes[index] = picture.width, picture.height, shown_width, shown_height
        tensors = zip((contracts.PIXELS, contracts.PAGE_SIZE), (pixels, sizes))
        return pb_utils.InferenceResponse([pb_utils.Tensor(spec.name, array) for spec, array in tensors])
