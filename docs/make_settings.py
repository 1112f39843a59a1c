"""Prints docs/settings.md, made from the settings classes and the docstrings of their fields.

python docs/make_settings.py > docs/settings.md
"""

from __future__ import annotations

import json
import sys
import types
import typing
from collections.abc import Iterator

from pydantic import BaseModel, JsonValue
from pydantic.fields import FieldInfo

from promptmill.settings import FlagValue, Profile

HEAD = """# Settings

<!-- Made by docs/make_settings.py from promptmill/settings.py; `make docs` makes it anew. -->

A profile is a TOML file. `promptmill settings PROFILE` prints it resolved: every setting with the value that
a run would use.

A value may come from four places; the earlier one in this list wins:

1. the command line: `--set server.port=8000`; a partition is addressed by its name, as in
   `--set partitions.B4_math.sampling.temperature=0.6`
2. the environment: `PROMPTMILL_` and the path with `__` between its parts, as in
   `PROMPTMILL_SERVER__PORT=8000`
3. the profile
4. the default

An unknown name is an error in each of them. Relative paths start at the working directory. Secrets are no
settings: the key of a server comes from the variable that `server.api_key_env` names, those of S3 from the
ordinary AWS variables, files and roles.

Not in effect yet: more than one of `server.replicas` is refused with exit status 2 before anything is
started.
"""
TOLD: dict[type[BaseModel], str] = {}
"""The path of a section that is told already: the same class elsewhere is not told twice."""
BOUNDS = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}


def main() -> None:
    sys.stdout.write(HEAD)
    for line in section(Profile, "top level"):
        sys.stdout.write(f"{line}\n")


def section(model: type[BaseModel], title: str, path: str = "") -> Iterator[str]:
    """The heading, the table of plain fields, and the sections below."""
    yield ""
    yield f"## {title}" if path else "## Top level"
    yield ""
    if (told := TOLD.setdefault(model, path)) != path:
        yield f"As `[{told}]`; what is not set here is as there."
        return
    yield one_line(model.__doc__)
    fields = {info.alias or name: info for name, info in model.model_fields.items()}
    below = {name: info for name, info in fields.items() if as_section(info.annotation)}
    plain = {name: info for name, info in fields.items() if name not in below}
    yield ""
    if any(info.description for info in plain.values()):
        yield "| name | type | default | meaning |"
        yield "|---|---|---|---|"
        for name, info in plain.items():
            cells = (f"`{name}`", type_of(info), default_of(info), in_cell(info.description))
            yield f"| {' | '.join(cells)} |"
    else:
        yield ", ".join(f"`{name}`" for name in plain) + "."
    for name, info in below.items():
        inner = as_section(info.annotation)
        here = f"{path}.{name}" if path else name
        if typing.get_origin(info.annotation) is list:
            yield from section(inner, f"`[[{here}]]`", here)
        elif typing.get_origin(info.annotation) is dict:
            yield from section(inner, f"`[{here}.NAME]`", here)
        else:
            yield from section(inner, f"`[{here}]`", here)


def as_section(annotation: object) -> typing.Any:
    """The settings class in `annotation`: itself, or as the values of a list or table."""
    for part in (annotation, *typing.get_args(annotation)):
        if isinstance(part, type) and issubclass(part, BaseModel):
            return part
    return None


def type_of(info: FieldInfo) -> str:
    bounds = [
        f"{sign} {getattr(limit, name):g}"
        for limit in info.metadata
        for name, sign in BOUNDS.items()
        if hasattr(limit, name)
    ]
    return ", ".join([words(info.annotation), *bounds])


def words(annotation: typing.Any) -> str:
    """A type as a reader of TOML would say it; that a setting may be left out, its default says."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        return words(arguments[0])
    if origin is typing.Literal:
        return " or ".join(f"`{value}`" for value in arguments)
    if annotation == FlagValue:
        return "plain value or list of text"
    if origin in (types.UnionType, typing.Union):
        return " or ".join(words(part) for part in arguments if part is not type(None))
    if origin is list:
        return f"list of {words(arguments[0])}"
    if origin is dict:
        return f"table of {words(arguments[1])}"
    named = {str: "text", int: "whole number", float: "number", bool: "true or false", JsonValue: "anything"}
    return named[annotation]


def default_of(info: FieldInfo) -> str:
    if info.is_required():
        return "required"
    default = info.get_default(call_default_factory=True)
    return "none" if default is None else f"`{json.dumps(default)}`"


def in_cell(text: str | None) -> str:
    return one_line(text).replace("|", "\\|").replace("<", "&lt;")


def one_line(text: str | None) -> str:
    return " ".join((text or "").split())


if __name__ == "__main__":
    main()
