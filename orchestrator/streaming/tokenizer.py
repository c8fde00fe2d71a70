"""Text to token ids and back, once for every engine: chat template, encoding, incremental decoding."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from jinja2 import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from orchestrator.errors import InvalidRequestError


class ChatTokenizer:
    """A model's tokenizer.json and chat_template.jinja.

    The template runs as Hugging Face runs it: sandboxed, with `trim_blocks` and `lstrip_blocks`, loop controls, plain
    JSON from `tojson`, the globals `raise_exception` and `strftime_now` that published templates call, and the
    tokenizer's `special_tokens` (`bos_token` and others) by name.
    """

    def __init__(self, tokenizer: Tokenizer, template: str, special_tokens: Mapping[str, str] | None = None) -> None:
        self._tokenizer = tokenizer
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = lambda form: datetime.now(timezone.utc).strftime(form)
        environment.globals.update(special_tokens or {})
        self._template = environment.from_string(template)

    @classmethod
    def load(cls, folder: Path) -> ChatTokenizer:
        """Read `folder`; raises `OSError` when a file is missing."""
        template = (folder / "chat_template.jinja").read_text(encoding="utf-8")
        settings = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
        special_tokens = {
            name: _content(token) for name, token in settings.items() if name.endswith("_token") and token
        }
        return cls(Tokenizer.from_buffer((folder / "tokenizer.json").read_bytes()), template, special_tokens)

    def encode(self, text: str) -> list[int]:
        """Token ids of `text` as it is. Other threads run meanwhile."""
        # Only the call for several texts gives up Python's lock.
        token_ids: list[int] = self._tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids
        return token_ids

    def encode_chat(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None = None
    ) -> list[int]:
        """Prompt token ids for `messages`, ending where the assistant's answer begins.

        Raises `InvalidRequestError` when the model's template refuses the messages.
        """
        try:
            prompt = self._template.render(messages=messages, tools=tools, add_generation_prompt=True)
        except TemplateError as error:
            raise InvalidRequestError(
                f"messages: the model's chat template refuses them: {error}", param="messages"
            ) from error
        return self.encode(prompt)

    def decode_stream(self) -> Detokenizer:
        """A fresh incremental decoder for one answer."""
        return Detokenizer(self._tokenizer)


class Detokenizer:
    """Decodes one answer as its token ids arrive.

    A character that spans tokens is held until it is whole, so no delta carries U+FFFD for it; bytes at the very end
    that never became a character are dropped. What was pushed so far, joined, is the decoding of all ids.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._stream = DecodeStream(skip_special_tokens=True)

    def push(self, token_ids: Sequence[int]) -> str:
        """The text that became certain with `token_ids`, possibly empty."""
        text = ""
        for token_id in token_ids:
            text += self._stream.step(self._tokenizer, token_id) or ""
        return text

    def name(self, token_id: int) -> str:
        """One token by itself as text; part of a character is U+FFFD."""
        text: str = self._tokenizer.decode([token_id], skip_special_tokens=False)
        return text


def _content(token: str | dict[str, Any]) -> str:
    """A special token's text; Hugging Face writes it alone or as an object."""
    return token if isinstance(token, str) else str(token["content"])


def _to_json(value: Any, indent: int | None = None) -> str:
    # Jinja's own escapes for HTML.
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _raise_exception(message: str) -> None:
    raise TemplateError(message)
