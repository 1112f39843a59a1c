"""A conversation becomes input ids; an answer's ids become reasoning and content.

The model's own tokenizer class renders (some override `apply_chat_template`), and the ids are the record:
text is derived from them, and reasoning ends at the first ids of its closing marker.
"""

from __future__ import annotations

import hashlib
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import jinja2
import orjson

from promptmill.encoding import Encode, Ids, make_encoder
from promptmill.errors import ConfigError, PromptRejected
from promptmill.markers import Markers, resolve
from promptmill.model import is_own_code
from promptmill.settings import ChatSettings
from promptmill.splitting import Split, Splitter
from promptmill.tool_arguments import PROBE_TOOLS, Form, form_of, with_arguments
from promptmill.types import Answer, Message

P = ParamSpec("P")
T = TypeVar("T")

# What a template raises depends on the template: its own refusal, or a field it did not expect.
_TEMPLATE_ERRORS = (
    jinja2.TemplateError,
    TypeError,
    ValueError,
    LookupError,
    AttributeError,
    AssertionError,
    ArithmeticError,
    RecursionError,
)
UNRENDERED = ("template_error", "tools_not_rendered", "bad_tool_arguments", "id_out_of_vocabulary")
"""Reasons of rows that the template cannot do with."""
_REMEMBERED_TOOLS = 4096


class ChatRenderer:
    """Renders and splits for one model. Safe to share between threads."""

    def __init__(self, tokenizer: Any, settings: ChatSettings) -> None:
        """Raises ConfigError for a template that is missing and markers that do not survive a round trip."""
        self._tokenizer = tokenizer
        self._settings = settings
        self._template = read_template(settings)
        self._kwargs = settings.template_kwargs
        _check_kwargs(self._kwargs)
        if self._template is None and not getattr(tokenizer, "chat_template", None):
            raise ConfigError("the model has no chat template; name one in chat.template.")
        self.markers: Markers = resolve(tokenizer, settings)
        self._splitter = Splitter(tokenizer, self.markers)
        self.decode = self._splitter.decode
        """Ids to text without special tokens."""
        end = getattr(tokenizer, "eos_token_id", None)
        self.end_ids = frozenset() if end is None else frozenset([int(end)])
        self._begin = getattr(tokenizer, "bos_token_id", None)
        self._shown_tools: set[tuple[bytes, str, str]] = set()

    def render(self, messages: Sequence[Message], tools: list[dict[str, Any]] | None) -> list[int]:
        """The input ids that ask for the next answer. Raises PromptRejected, with the template's words."""
        return list(self._finished(messages, tools, self._ids(messages, tools)))

    def render_many(
        self, prompts: Sequence[tuple[Sequence[Message], list[dict[str, Any]] | None]]
    ) -> list[Ids | PromptRejected]:
        """What `render` gives or raises for each; far quicker where the tokenizer's class allows it."""
        if self._encode is None:
            return [_or_reject(self.render, *prompt) for prompt in prompts]
        texts = self._texts(prompts)
        try:
            encoded = iter(self._encode([text for text in texts if isinstance(text, str)]))
        except _TEMPLATE_ERRORS:  # one of them cannot be encoded; which one is seen row by row
            return [_or_reject(self.render, *prompt) for prompt in prompts]
        return [
            _or_reject(self._finished, *prompt, next(encoded)) if isinstance(text, str) else text
            for prompt, text in zip(prompts, texts, strict=True)
        ]

    def render_text(self, messages: Sequence[Message], tools: list[dict[str, Any]] | None) -> str:
        return str(self._call(messages, tools, tokenize=False))

    def split(self, prompt_ids: Sequence[int], output_ids: Sequence[int]) -> Split:
        """Reasoning and content of an answer to a prompt."""
        return self._splitter(prompt_ids, output_ids)

    def is_opened(self, prompt_ids: Sequence[int]) -> bool:
        """Whether the prompt ends inside reasoning."""
        return bool(self.markers) and self._splitter.is_opened(prompt_ids)

    @property
    def marker_texts(self) -> tuple[str, str]:
        """What opens and what closes reasoning, as text; empty where there is none."""
        return self.decode_all(self.markers.open), self.decode_all(self.markers.close)

    def decode_all(self, ids: Sequence[int]) -> str:
        """Text with its special tokens, to be looked at."""
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=False))

    def shows_reasoning(self, messages: Sequence[Message], prompt_ids: Sequence[int]) -> str | None:
        """How much of its earlier reasoning a prompt shows: `all`, `some`, `none`; None: there is none."""
        thoughts = [str(m["reasoning_content"]).strip() for m in messages if m.get("reasoning_content")]
        if not thoughts:
            return None
        text = self.decode(prompt_ids)
        said = "\n".join(str(message.get("content")) for message in messages)
        shown = sum(text.count(thought) > said.count(thought) for thought in thoughts)
        return "none" if not shown else "all" if shown == len(thoughts) else "some"

    def control_tokens(self) -> list[str]:
        """The tokens that the tokenizer has added to its vocabulary, flagged as special or not."""
        return list(self._tokenizer.get_added_vocab())

    def fingerprint(self) -> str:
        """Changes with the tokenizer's vocabulary, the template and its arguments."""
        return self._fingerprint

    def describe(self) -> dict[str, Any]:
        """What a release says of it, beside the fingerprint."""
        template = self._template or self._tokenizer.chat_template
        marks = self.markers
        return {
            "fingerprint": self.fingerprint(),
            "tokenizer": type(self._tokenizer).__name__,
            "template_sha256": hashlib.sha256(str(template).encode()).hexdigest(),
            "template_kwargs": self._kwargs,
            "reasoning": marks.family,
            "reasoning_ids": [list(marks.open), list(marks.close)],
        }

    @cached_property
    def vocabulary(self) -> int:
        """One more than the highest id; a vocabulary may have holes."""
        return 1 + max(map(int, self._tokenizer.get_vocab().values()))

    @cached_property
    def _encode(self) -> Encode | None:
        """Made when it is first wanted: that goes through the whole vocabulary."""
        return make_encoder(self._tokenizer)

    @cached_property
    def _fingerprint(self) -> str:
        template = self._template or self._tokenizer.chat_template
        probe = self._tokenizer("The 3 quick\n brown föxes 🦊", add_special_tokens=False)["input_ids"]
        parts: list[Any] = [
            type(self._tokenizer).__name__,
            len(self._tokenizer),
            probe,
            template,
            sorted(self._kwargs.items()),
        ]
        if code := _own_code(self._tokenizer):
            parts.append(code)
        if self._settings.open_reasoning:
            parts.append(("open_reasoning", *self.markers.open))
        return hashlib.sha256(repr(tuple(parts)).encode()).hexdigest()[:32]

    @cached_property
    def _arguments(self) -> Form | None:
        """How the template wants the arguments of tool calls."""
        if self._settings.tool_arguments != "auto":
            return self._settings.tool_arguments
        return form_of(lambda messages: str(self._apply(self._named(messages), PROBE_TOOLS, tokenize=False)))

    def _finished(self, messages: Sequence[Message], tools: list[dict[str, Any]] | None, ids: Ids) -> Ids:
        """The ids of a rendered prompt, looked at. Raises PromptRejected."""
        if not ids:
            raise PromptRejected("template_error", "the template renders this prompt to nothing")
        if tools and self._settings.ignored_tools == "reject" and not self._shows(tools, messages, ids):
            raise PromptRejected("tools_not_rendered", "the template renders this prompt without its tools")
        if max(ids) >= self.vocabulary:
            raise PromptRejected("id_out_of_vocabulary", f"id {max(ids)} of {self.vocabulary}")
        while self._begin is not None and list(ids[:2]) == [self._begin] * 2:
            del ids[0]  # the template's own, and one that the tokenizer's class adds
        if self._settings.open_reasoning and self.markers and not self._splitter.reasons(ids):
            ids.extend(self.markers.open)
        return ids

    def _ids(self, messages: Sequence[Message], tools: list[dict[str, Any]] | None) -> list[int]:
        ids = self._call(messages, tools, tokenize=True)
        return [int(i) for i in (ids["input_ids"] if isinstance(ids, Mapping) else ids)]

    def _texts(
        self, prompts: Sequence[tuple[Sequence[Message], list[dict[str, Any]] | None]]
    ) -> list[str | PromptRejected]:
        """What `render_text` gives or raises for each; all in one call where that is the same."""
        if not any(tools is not None or _has_calls(messages) for messages, tools in prompts):
            with suppress(PromptRejected):  # which one it is, is seen row by row
                return list(
                    self._apply([self._named(messages) for messages, _ in prompts], None, tokenize=False)
                )
        return [_or_reject(self.render_text, *prompt) for prompt in prompts]

    def _call(self, messages: Sequence[Message], tools: list[dict[str, Any]] | None, tokenize: bool) -> Any:
        if not _has_calls(messages):
            return self._apply(self._named(messages), tools, tokenize)
        try:
            return self._apply(self._named(with_arguments(messages, self._arguments)), tools, tokenize)
        except PromptRejected as error:
            if self._arguments is not None or error.reason != "template_error":
                raise
            with suppress(PromptRejected):  # it renders the probe in neither form: each row is tried in both
                return self._apply(self._named(with_arguments(messages, "mapping")), tools, tokenize)
            raise

    def _named(self, messages: Sequence[Message]) -> Sequence[Message]:
        field = self.markers.field
        return messages if field == "reasoning_content" else _renamed(messages, field)

    def _apply(
        self,
        said: Sequence[Message] | Sequence[Sequence[Message]],
        tools: list[dict[str, Any]] | None,
        tokenize: bool,
    ) -> Any:
        """Of one conversation, or of each of several. Raises PromptRejected."""
        try:
            return self._tokenizer.apply_chat_template(
                said,
                tools=tools,
                chat_template=self._template,
                add_generation_prompt=True,
                tokenize=tokenize,
                **({"return_dict": False} if tokenize else {}),
                **self._kwargs,
            )
        except _TEMPLATE_ERRORS as error:
            raise PromptRejected("template_error", str(error) or type(error).__name__) from None

    def _shows(self, tools: list[dict[str, Any]], messages: Sequence[Message], ids: Ids) -> bool:
        """Whether the prompt is another one without its tools; looked at once for tools and outer roles."""
        try:
            digest = hashlib.sha256(orjson.dumps(tools)).digest()
        except TypeError:  # an integer over 64 bits
            return list(ids) != self._ids(messages, None)
        key = (digest, str(messages[0]["role"]), str(messages[-1]["role"]))
        if key in self._shown_tools:
            return True
        if list(ids) == self._ids(messages, None):
            return False
        if len(self._shown_tools) >= _REMEMBERED_TOOLS:
            self._shown_tools.clear()
        self._shown_tools.add(key)
        return True


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


def _has_calls(messages: Sequence[Message]) -> bool:
    return any(message.get("tool_calls") for message in messages)


def _renamed(messages: Sequence[Message], field: str) -> list[Message]:
    """Reasoning under the name that the template reads; gpt-oss takes none beside the text of a call."""
    return [
        {**message, field: message["reasoning_content"]}
        if message.get("reasoning_content") and not (message.get("tool_calls") and message.get("content"))
        else message
        for message in messages
    ]


def _own_code(tokenizer: Any) -> str:
    """A hash of the code that a tokenizer brings; empty for the library's own classes."""
    if not is_own_code(tokenizer):
        return ""
    source = inspect.getsource(sys.modules[type(tokenizer).__module__])
    return hashlib.sha256(source.encode()).hexdigest()


def _check_kwargs(kwargs: Mapping[str, Any]) -> None:
    """That they are the template's own arguments, and none of rendering. Raises ConfigError."""
    from transformers import PreTrainedTokenizerBase

    own = inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters
    if taken := [name for name in kwargs if (name in own or name == "messages") and name != "documents"]:
        raise ConfigError(
            f"chat.template_kwargs: {', '.join(taken)}: that says how to render, and is set elsewhere or "
            "not at all; only what the template itself looks for belongs here."
        )


def read_template(settings: ChatSettings) -> str | None:
    """The template that the profile names, or None for the model's own. Raises ConfigError."""
    if not settings.template:
        return None
    try:
        return Path(settings.template).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:  # ValueError: no UTF-8, or a path with a NUL in it
        raise ConfigError(f"chat.template {settings.template!r}: cannot be read: {error}.") from None
