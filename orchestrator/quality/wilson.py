"""How sure a share is."""

from __future__ import annotations

import math


def wilson_interval(num_hits: int, num: int, z: float = 1.96) -> tuple[float, float]:
    """Wilson's score interval of a share, 95 % by default: honest for small numbers and for shares near 0 or 1.

    E. B. Wilson, "Probable Inference, the Law of Succession, and Statistical Inference", 1927. Of none, (0, 1).
    """
    if not 0 <= num_hits <= num:
        raise ValueError(f"num_hits: {num_hits} of {num}; 0 to {num} are allowed")
    if num == 0:
        return 0.0, 1.0
    share = num_hits / num
    middle = share + z * z / (2 * num)
    spread = z * math.sqrt(share * (1 - share) / num + z * z / (4 * num * num))
    below, above = (middle - spread) / (1 + z * z / num), (middle + spread) / (1 + z * z / num)
    return max(0.0, below), min(1.0, above)
