"""Guides as grammars, for every engine that has xgrammar: what a schema or a pattern allows is the same everywhere."""

from __future__ import annotations

import functools
import json

from orchestrator import contracts, regexes, schemas
from orchestrator.engines import EngineRefusal
from orchestrator.errors import InvalidRequestError

_NAME = contracts.GUIDED_DECODING_GUIDE.name


@functools.lru_cache(maxsize=64)
def to_grammar(guide_type: str, text: str | None) -> str:
    """The guide as EBNF: xgrammar's own converters skip what they do not know; type json is any JSON object.

    Raises `EngineRefusal` for what a grammar cannot say.
    """
    try:
        if guide_type == "regex":
            return regexes.to_grammar(text or "", _NAME)
        if guide_type == "ebnf_grammar":
            return text or ""
        return schemas.to_grammar(json.loads(text) if text else {"type": "object"}, _NAME)
    except InvalidRequestError as error:
        raise EngineRefusal(error.message) from error
