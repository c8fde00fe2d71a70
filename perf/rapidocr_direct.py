"""A worker: pages read by rapidocr, called directly. It runs in rapidocr's own virtual environment.

{"images": ["hex of a PNG", ...], "clients": n}
→ {"times_ms": [...], "seconds": s, "processor_s": s, "texts": [["line", ...], ...]}
"""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from perf.worker import answer_requests


def main() -> None:
    from rapidocr import RapidOCR

    engine = RapidOCR(params={"Global.log_level": "error"})

    def read(request: dict[str, Any]) -> dict[str, Any]:
        images = [bytes.fromhex(image) for image in request["images"]]
        times_ms, texts = [0.0] * len(images), [[""]] * len(images)

        def run(client: int) -> None:
            for index in range(client, len(images), request["clients"]):
                started_s = time.perf_counter()
                found = engine(images[index])
                times_ms[index] = (time.perf_counter() - started_s) * 1000
                texts[index] = list(found.txts or ())

        started_s, used_s = time.perf_counter(), time.process_time()
        with ThreadPoolExecutor(request["clients"]) as pool:
            for done in [pool.submit(run, client) for client in range(request["clients"])]:
                done.result()
        seconds, used_s = time.perf_counter() - started_s, time.process_time() - used_s
        return {"times_ms": times_ms, "seconds": seconds, "processor_s": used_s, "texts": texts}

    answer_requests(read)


if __name__ == "__main__":
    main()
