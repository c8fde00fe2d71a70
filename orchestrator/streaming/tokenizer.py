"""Text to token ids and back, once for every engine: chat template, encoding, incremental decoding."""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from jinja2 import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from orchestrator.errors import InvalidRequestError
from orchestrator.streaming.control_tokens import ControlTokens


class ChatTokenizer:
    """A model's tokenizer.json and chat_template.jinja.

    The template runs as Hugging Face runs it: sandboxed, with `trim_blocks` and `lstrip_blocks`, loop controls, plain
    JSON from `tojson`, the globals `raise_exception` and `strftime_now` that published templates call, and the
    tokenizer's `special_tokens` (`bos_token` and others) by name.
    """

    def __init__(self, tokenizer: Tokenizer, template: str, special_tokens: Mapping[str, str] | None = None) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = max(tokenizer.get_vocab().values(), default=-1) + 1  # an id may be left out
        self._control_tokens = ControlTokens(tokenizer)
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = lambda form: datetime.now(timezone.utc).strftime(form)
        environment.globals.update(special_tokens or {})
        self._template = environment.from_string(template)

    @property
    def vocab_size(self) -> int:
        """Token ids are below it."""
        return self._vocab_size

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
        """Token ids of `text` as it is, control tokens in it too. Other threads run meanwhile."""
        # Only the call for several texts gives up Python's lock.
        token_ids: list[int] = self._tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids
        return token_ids

    def encode_chat(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None = None
    ) -> list[int]:
        """Prompt token ids for `messages`, ending where the assistant's answer begins.

        Control tokens are the template's alone; in messages and tools their text is text. Raises `InvalidRequestError`
        when the model's template refuses the messages, or ignores the name in one of them.
        """
        hidden: list[str] = []
        messages, tools = self._control_tokens.hide(messages, hidden), self._control_tokens.hide(tools, hidden)
        try:
            prompt = self._render(messages, tools)
            self._check_names(messages, tools)
            return self._control_tokens.encode(prompt, hidden) if hidden else self.encode(prompt)
        except (TemplateError, ValueError) as error:
            raise InvalidRequestError(
                f"messages: the model's chat template refuses them: {self._control_tokens.show(str(error), hidden)}",
                param="messages",
            ) from error

    def write_chat(self, messages: Sequence[Mapping[str, Any]], token_ids: Sequence[int]) -> str:
        """The prompt whose ids `encode_chat` gave, as a text for a tokenizer that adds its own first token.

        Raises `InvalidRequestError` when no text has these ids: a control token in the messages would be one.
        """
        prompt = self._render(messages, [])
        first = self._tokenizer.decode(list(token_ids[:1]), skip_special_tokens=False)
        for text in (prompt.removeprefix(first), prompt):
            if self.encode_whole(text) == token_ids:
                return text
        raise InvalidRequestError(
            "messages: they hold the text of a control token, which this model would take for one; remove it",
            param="messages",
        )

    def encode_whole(self, text: str) -> list[int]:
        """Token ids of `text` as a library gives them that is told nothing else: with the first token that is added."""
        token_ids: list[int] = self._tokenizer.encode(text).ids
        return token_ids

    def _render(self, messages: Any, tools: Any) -> str:
        return self._template.render(messages=messages, tools=tools, add_generation_prompt=True)

    def _check_names(self, messages: Sequence[Mapping[str, Any]], tools: Any) -> None:
        """Most templates write no names. Found out by writing others, and looking for them."""
        names = {index: secrets.token_hex(8) for index, message in enumerate(messages) if "name" in message}
        if not names:
            return
        renamed = [{**each, "name": names[index]} if index in names else each for index, each in enumerate(messages)]
        prompt = self._render(renamed, tools)
        for index, name in names.items():
            if name not in prompt:
                raise InvalidRequestError(
                    f"messages[{index}].name: not supported by the model's chat template; remove it",
                    param=f"messages[{index}].name",
                )

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
