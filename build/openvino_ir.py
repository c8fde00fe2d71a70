"""OpenVINO IR of a GGUF, made in a process of its own: a crash there is an error, not the build's end.

Run as `python -m build.openvino_ir GGUF` it is that process: OpenVINO GenAI writes the IR beside the GGUF.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from build.errors import BuildError
from build.products import with_parent

FILES = tuple(f"openvino_{part}.{kind}" for part in ("model", "tokenizer", "detokenizer") for kind in ("xml", "bin"))


def write_openvino_ir(gguf: Path, folder: Path) -> None:
    """Write `FILES` into `folder`, the same bytes each time; raises `BuildError` with the child's words."""
    folder.mkdir(parents=True)
    link = folder / "model.gguf"
    link.symlink_to(gguf.absolute())
    done = subprocess.run(
        with_parent([sys.executable, "-m", "build.openvino_ir", str(link.absolute())]),
        cwd=Path(__file__).parent.parent,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        check=False,
    )
    link.unlink()
    missing = [name for name in FILES if not (folder / name).is_file()]
    if done.returncode != 0 or missing:
        last_lines = "\n".join(done.stdout.splitlines()[-15:])
        reason = f"exit code {done.returncode}" if done.returncode else f"not written: {', '.join(missing)}"
        raise BuildError(f"OpenVINO could not convert {gguf.name} ({reason}); its last lines:\n{last_lines}")


def _convert(gguf: str) -> None:
    import openvino_genai as genai  # heavy, and wanted in the child only

    # Names inside the IR count what this process made before: only a fixed order in a fresh process gives
    # equal bytes.
    genai.Tokenizer(gguf, enable_save_ov_model=True)
    # Loading is what saves; a pool of the smallest size keeps it cheap.
    scheduler = genai.SchedulerConfig()
    scheduler.num_kv_blocks = 1
    genai.ContinuousBatchingPipeline(gguf, scheduler, "CPU", {"enable_save_ov_model": True})


if __name__ == "__main__":
    _convert(sys.argv[1])
