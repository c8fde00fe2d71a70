"""Text in images: what the models `image_preprocess` and `ocr*` and `/v1/ocr` do, apart from Triton and HTTP."""
