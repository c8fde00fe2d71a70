"""Tiers behind an OpenAI-compatible API: text comes in where engines send token ids.

sse.py          the stream's events out of bytes
events.py       what an event says
client.py       the pooled HTTP client, its timeouts and errors
http2.py        tells an HTTP/2 server that nobody waits for a stream any more
generation.py   the generate stage of such a tier
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from orchestrator.cloud.generation import CloudClient
from orchestrator.config import ConfigError, Tier


def create_cloud_client(tiers: Iterable[Tier], environ: Mapping[str, str]) -> CloudClient | None:
    """The client of the cloud tiers among `tiers`, keys from `environ`; None without any, and then nothing is loaded.

    Raises `ConfigError` when a key is missing or the extra `cloud` is not installed.
    """
    cloud_tiers = [tier for tier in tiers if tier.cloud is not None]
    if not cloud_tiers:
        return None
    try:
        from orchestrator.cloud.client import HttpCloudClient
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"tier {cloud_tiers[0].name!r} is a cloud tier, which needs the package {error.name}; "
            "pip install 'triton-realtime[cloud]'"
        ) from error
    return HttpCloudClient(cloud_tiers, environ)
