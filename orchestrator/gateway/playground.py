"""The page at `/`: chat, voice, OCR and live metrics in a browser. One file, nothing from elsewhere."""

from __future__ import annotations

import base64
import hashlib
import re
from pathlib import Path

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

PAGE = Path(__file__).with_name("playground.html")


class Playground:
    """An ASGI endpoint. The page's own script and style are let in by their hashes, and nothing else."""

    def __init__(self) -> None:
        self._page = PAGE.read_bytes()
        self._headers = {
            "content-type": "text/html; charset=utf-8",
            "content-security-policy": "; ".join(
                (
                    "default-src 'none'",
                    f"script-src '{_hash_of(self._page, b'script')}' blob:",  # the microphone's worklet
                    f"style-src '{_hash_of(self._page, b'style')}'",
                    "style-src-attr 'none'",
                    "connect-src 'self'",
                    "img-src blob: data:",
                    "base-uri 'none'",
                    "form-action 'none'",
                    "frame-ancestors 'none'",
                )
            ),
            "referrer-policy": "no-referrer",
            "x-content-type-options": "nosniff",
            "cache-control": "no-cache",
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await Response(self._page, headers=self._headers)(scope, receive, send)


def _hash_of(page: bytes, tag: bytes) -> str:
    (text,) = re.findall(rb"<%s>(.*?)</%s>" % (tag, tag), page, re.DOTALL)
    return "sha256-" + base64.b64encode(hashlib.sha256(text).digest()).decode()
