"""A conversation becomes input ids; an answer's ids become reasoning and content.

The model's own tokenizer class renders (some override `apply_chat_template`), and the ids are the record:
text is derived from them, and reasoning ends at the first ids of its closing marker.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import jinja2

from promptmill.decoding import make_decoder
from promptmill.encoding import make_encoder
from promptmill.errors import ConfigError, PromptRejected
from promptmill.settings import ChatSettings
from promptmill.types import Answer, Message

P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Split:
    """An answer, taken apart. Neither text carries a marker."""

    reasoning: str
    content: str
    reasoning_tokens: int
    """Output ids up to and with the closing marker."""
    flags: list[str]


class ChatRenderer:
    """Renders and splits for one model. Safe to share between threads."""

    def __init__(self, tokenizer: Any, settings: ChatSettings) -> None:
        """Raises ConfigError for a template that is missing and markers that do not survive a round trip."""
        self._tokenizer = tokenizer
        self._is_blank = lru_cache(lambda ids: not self.decode_all(ids).strip())  # nearly always the same ids
        self._template = read_template(settings)
        self._kwargs = settings.template_kwargs
        if self._template is None and not getattr(tokenizer, "chat_template", None):
            raise ConfigError("the model has no chat template; name one in chat.template.")
        self.open_ids = self._marker(settings.reasoning_open)
        self.close_ids = self._marker(settings.reasoning_close)
        self.decode = make_decoder(tokenizer)
        """Ids to text without special tokens."""
        self._encode = make_encoder(tokenizer)
        self.vocabulary = len(tokenizer)
        end = getattr(tokenizer, "eos_token_id", None)
        self.end_ids = frozenset() if end is None else frozenset([int(end)])

    def render(self, messages: Sequence[Message], tools: list[dict[str, Any]] | None) -> list[int]:
        """The input ids that ask for the next answer. Raises PromptRejected, with the template's words."""
        ids = self._apply(messages, tools)
        if tools:
            self._check_tools(ids, self._apply(messages, None))
        return self._checked(ids)

    def render_many(
        self, prompts: Sequence[tuple[Sequence[Message], list[dict[str, Any]] | None]]
    ) -> list[list[int] | PromptRejected]:
        """What `render` gives or raises for each; far quicker where the tokenizer's class allows it."""
        if self._encode is None:
            return [_or_reject(self.render, *prompt) for prompt in prompts]
        texts = [_or_reject(self._text_with_tools, *prompt) for prompt in prompts]
        try:
            encoded = iter(self._encode([text for text in texts if isinstance(text, str)]))
        except (TypeError, ValueError):  # one of them cannot be encoded; which one is seen row by row
            return [_or_reject(self.render, *prompt) for prompt in prompts]
        return [_or_reject(self._checked, next(encoded)) if isinstance(t, str) else t for t in texts]

    def render_text(self, messages: Sequence[Message], tools: list[dict[str, Any]] | None) -> str:
        return str(self._call(messages, tools, tokenize=False))

    def split(self, prompt_ids: Sequence[int], output_ids: Sequence[int]) -> Split:
        """Reasoning and content of an answer to a prompt."""
        ids = list(output_ids)
        opened = self.is_opened(prompt_ids)
        skip = 0
        if self.open_ids and ids[: len(self.open_ids)] == self.open_ids:
            opened, skip = True, len(self.open_ids)  # some models repeat the marker that opened the prompt
        if not opened or not self.close_ids:
            return Split("", self.decode(ids).strip(), 0, [])
        at = _find(ids, self.close_ids)
        if at is None:
            return Split(self.decode(ids[skip:]).strip(), "", len(ids), ["reasoning_never_closed"])
        after = at + len(self.close_ids)
        content = self.decode(ids[after:]).strip()
        return Split(self.decode(ids[skip:at]).strip(), content, after, [])

    @property
    def markers(self) -> tuple[str, str]:
        """What opens and what closes reasoning, as text; empty where there is none."""
        return self.decode_all(self.open_ids), self.decode_all(self.close_ids)

    def decode_all(self, ids: Sequence[int]) -> str:
        """Text with its special tokens, to be looked at."""
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=False))

    def fingerprint(self) -> str:
        """Changes with the tokenizer's vocabulary, the template and its arguments."""
        template = self._template or self._tokenizer.chat_template
        probe = self._tokenizer("The 3 quick\n brown föxes 🦊", add_special_tokens=False)["input_ids"]
        parts = (
            type(self._tokenizer).__name__,
            self.vocabulary,
            probe,
            template,
            sorted(self._kwargs.items()),
        )
        return hashlib.sha256(repr(parts).encode()).hexdigest()[:32]

    def _text_with_tools(self, messages: Sequence[Message], tools: list[dict[str, Any]] | None) -> str:
        text = self.render_text(messages, tools)
        if tools:
            self._check_tools(text, self.render_text(messages, None))
        return text

    def _check_tools(self, rendered: object, without: object) -> None:
        if rendered == without:
            raise PromptRejected("tools_not_rendered", "the template renders this prompt without its tools")

    def _checked(self, ids: list[int]) -> list[int]:
        if ids and max(ids) >= self.vocabulary:
            raise PromptRejected("id_out_of_vocabulary", f"id {max(ids)} of {self.vocabulary}")
        return ids

    def _apply(self, messages: Sequence[Message], tools: list[dict[str, Any]] | None) -> list[int]:
        return [int(i) for i in self._call(messages, tools, tokenize=True)]

    def _call(self, messages: Sequence[Message], tools: list[dict[str, Any]] | None, tokenize: bool) -> Any:
        try:
            return self._tokenizer.apply_chat_template(
                messages,
                tools=tools,
                chat_template=self._template,
                add_generation_prompt=True,
                tokenize=tokenize,
                **({"return_dict": False} if tokenize else {}),
                **self._kwargs,
            )
        # What a template raises depends on the template: its own refusal, or a field it did not expect.
        except (jinja2.TemplateError, TypeError, ValueError, KeyError, AttributeError) as error:
            raise PromptRejected("template_error", str(error) or type(error).__name__) from None

    def _marker(self, text: str) -> list[int]:
        if not text:
            return []
        ids = [int(i) for i in self._tokenizer(text, add_special_tokens=False)["input_ids"]]
        back = self._tokenizer.decode(ids, skip_special_tokens=False)
        if back != text:
            raise ConfigError(
                f"the reasoning marker {text!r} comes back from the tokenizer as {back!r}: "
                "it is not this model's tokenizer, or not its marker (chat.reasoning_open, reasoning_close)."
            )
        return ids

    def is_opened(self, prompt_ids: Sequence[int]) -> bool:
        """Whether the prompt ends inside reasoning: opened, with nothing but white space behind."""
        if not self.open_ids:
            return False
        tail = list(prompt_ids[-len(self.open_ids) - 4 :])
        at = _find(tail, self.open_ids)
        if at is None:
            return False
        behind = tail[at + len(self.open_ids) :]
        # Special tokens count: `<think></think>` is reasoning that was opened and closed.
        return self._is_blank(tuple(behind))


def as_message(answer: Answer) -> Message:
    """An answer as the history of the next turn; whether its reasoning is shown is the template's choice."""
    message: Message = {"role": "assistant", "content": answer.content}
    if answer.reasoning:
        message["reasoning_content"] = answer.reasoning
    return message


def _or_reject(render: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T | PromptRejected:
    try:
        return render(*args, **kwargs)
    except PromptRejected as reject:
        return reject


def _find(ids: list[int], wanted: list[int]) -> int | None:
    at = -1
    with suppress(ValueError):
        while True:
            at = ids.index(wanted[0], at + 1)
            if ids[at : at + len(wanted)] == wanted:
                return at
    return None


def read_template(settings: ChatSettings) -> str | None:
    """The template that the profile names, or None for the model's own. Raises ConfigError."""
    if not settings.template:
        return None
    try:
        return Path(settings.template).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"chat.template {settings.template!r}: cannot be read: {error}.") from None
