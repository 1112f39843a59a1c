"""A tokenizer that a model brings: bytes, and tools as TypeScript where plain Jinja would show JSON."""

import json

from transformers import PreTrainedTokenizer

_TYPES = {"string": "string", "integer": "number", "number": "number", "boolean": "boolean"}


def as_typescript(tools):
    """Tools as a namespace of functions; what plain Jinja would show as JSON."""
    lines = ["namespace functions {"]
    for tool in tools:
        function = tool["function"]
        if function.get("description"):
            lines.append(f"// {function['description']}")
        parameters = function.get("parameters") or {}
        required = parameters.get("required", [])
        fields = [
            f"{name}{'' if name in required else '?'}: {_type(schema)}"
            for name, schema in (parameters.get("properties") or {}).items()
        ]
        lines.append(f"type {function['name']} = (_: {{ {', '.join(fields)} }}) => any;")
    return "\n".join([*lines, "}"])


def _type(schema):
    if "enum" in schema:
        return " | ".join(json.dumps(value) for value in schema["enum"])
    return _TYPES.get(schema.get("type"), "any")


class BytesTokenizer(PreTrainedTokenizer):
    """Ids 0 to 255 are bytes; the added tokens follow."""

    model_input_names = ["input_ids"]  # noqa: RUF012

    @property
    def vocab_size(self):
        return 256

    def get_vocab(self):
        return {chr(256 + byte): byte for byte in range(256)} | dict(self.added_tokens_encoder)

    def _tokenize(self, text, **kwargs):
        return [chr(256 + byte) for byte in text.encode()]

    def _convert_token_to_id(self, token):
        return self.get_vocab().get(token)

    def _convert_id_to_token(self, index):
        return chr(256 + index)

    def convert_tokens_to_string(self, tokens):
        pieces = (bytes([ord(t) - 256]) if len(t) == 1 and ord(t) >= 256 else t.encode() for t in tokens)
        return b"".join(pieces).decode("utf-8", "replace")

    def save_vocabulary(self, save_directory, filename_prefix=None):
        return ()

    def apply_chat_template(self, conversation, tools=None, **kwargs):
        if tools:
            kwargs["tools_ts"] = as_typescript(tools)
        return super().apply_chat_template(conversation, tools=tools, **kwargs)
