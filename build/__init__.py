"""The compiler: `python -m build --target cpu` turns a target's row of data into `artifacts/cpu/`.

    targets/*.toml    one row a target: Triton models with their settings, engine parameters, tiers
    models/*.toml     one row a language model or embedder: architecture, token ids, where the weights come from
    rows.py           the rows, typed and strict
    fetch.py          weights from a package index, verified, never executed
    tokenizer.py      tokenizer.json and chat template from the weights' metadata
    bert_onnx.py      a sentence embedder as an ONNX graph
    openvino_ir.py    OpenVINO IR, in a process of its own
    recipes.py        the steps each engine needs
    render.py         config.pbtxt, tiers.toml and embedder.toml
    manifest.py       what an artifact was made from and what it consists of
    locks.py          one build of a target, one fetch of a file at a time
    compiler.py       all of it, in order, atomically

Run from a checkout; it is not in the wheel.
"""
