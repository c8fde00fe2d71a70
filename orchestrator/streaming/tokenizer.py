"""Text to token ids and back, once for every engine: chat template, encoding, incremental decoding."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from jinja2 import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from orchestrator.errors import InvalidRequestError

REPLACEMENT = "\ufffd"


class ChatTokenizer:
    """A model's tokenizer.json and chat_template.jinja.

    The template runs as Hugging Face runs it: sandboxed, with `trim_blocks` and `lstrip_blocks`, and with the
    globals `raise_exception` and `strftime_now` that published templates call.
    """

    def __init__(self, tokenizer: Tokenizer, template: str) -> None:
        self._tokenizer = tokenizer
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = lambda form: datetime.now(timezone.utc).strftime(form)
        self._template = environment.from_string(template)

    @classmethod
    def load(cls, folder: Path) -> ChatTokenizer:
        """Read `folder`; raises `OSError` when a file is missing."""
        template = (folder / "chat_template.jinja").read_text(encoding="utf-8")
        return cls(Tokenizer.from_buffer((folder / "tokenizer.json").read_bytes()), template)

    def encode_chat(self, messages: Sequence[dict[str, Any]]) -> list[int]:
        """Prompt token ids for `messages`, ending where the assistant's answer begins.

        Raises `InvalidRequestError` when the model's template refuses the messages.
        """
        try:
            prompt = self._template.render(messages=messages, add_generation_prompt=True)
        except TemplateError as error:
            raise InvalidRequestError(
                f"messages: the model's chat template refuses them: {error}", param="messages"
            ) from error
        token_ids: list[int] = self._tokenizer.encode(prompt, add_special_tokens=False).ids
        return token_ids

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


def _raise_exception(message: str) -> None:
    raise TemplateError(message)
