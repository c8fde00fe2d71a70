"""The compiler: `python -m build --target cpu` turns a target's row of data into `artifacts/cpu/`.

    targets/*.toml    one row a target: Triton models with their settings, engine parameters, tiers
    models/*.toml     one row a language model or embedder: architecture, token ids, where the weights come from
    rows.py           targets, typed and strict, and the reading of all rows
    model_rows.py     models; engine_rows.py: what each engine can be told; gpu_rows.py: hardware and container
    pairs.py          what cannot go together on a GPU
    plan.py           what a GPU holds and at best does; plan_report.py prints it
    machine.py        is this the GPU and the container of the target
    fetch.py          weights from a package index, verified, never executed
    tokenizer.py      tokenizer.json and chat template from the weights' metadata
    bert_onnx.py      a sentence embedder as an ONNX graph
    blockwise.py      its matrices in INT8, for a CPU
    openvino_ir.py    OpenVINO IR, in a process of its own
    trtllm.py         the container's commands that make a TensorRT-LLM engine; verify_engine.py is one of them
    plan_commands.py  the commands that make a TensorRT plan: onnx_graph.py, tensorrt_plan.py, verify_plan.py
    profiles.py       the shapes that a plan takes
    precision.py      an ONNX graph in FP16, INT8 or FP8
    products.py       what such commands make, kept by what it is made from
    checkpoint_tokenizer.py  tokenizer and chat template from a Hugging Face checkpoint
    recipes.py        the steps each engine needs
    render.py         config.pbtxt, tiers.toml and embedder.toml; render_trtllm.py for TensorRT-LLM's two models
    manifest.py       what an artifact was made from and what it consists of
    locks.py          one build of a target, one fetch of a file at a time
    compiler.py       all of it, in order, atomically
    commands.py       what it would run, and running a part of it

Run from a checkout; it is not in the wheel.
"""
