"""`python -m perf.gpu.bandwidth`: how fast the GPU reads and writes its memory, in bytes/s, on stdout.

It runs with the Python that has torch.
"""

from __future__ import annotations

_NUM_BYTES = 4 << 30  # many times what any cache holds
_COPIES = 20


def main() -> None:
    import torch

    source = torch.ones(_NUM_BYTES, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for number in range(_COPIES + 3):
        if number == 3:  # the first warm up
            start.record()
        target.copy_(source)
    end.record()
    torch.cuda.synchronize()
    print(2 * _NUM_BYTES * _COPIES / (start.elapsed_time(end) / 1000))


if __name__ == "__main__":
    main()
