"""Reads a profile: the file, the environment and the command line, merged and checked.

Environment variables are PROMPTMILL_ and the path of a setting with `__` between its parts, in any case:
PROMPTMILL_SERVER__PORT=8000. Overrides are `a.b=value`; a partition is addressed by its name.
Values are read as TOML (numbers, true, lists), and as plain text where that fails.
"""

from __future__ import annotations

import difflib
import os
import tomllib
import types
import typing
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from promptmill.errors import ConfigError
from promptmill.settings import PartitionSettings, Profile

ENV_PREFIX = "PROMPTMILL_"


def load_profile(
    name: str, overrides: Iterable[str] = (), environ: Mapping[str, str] | None = None
) -> Profile:
    """The resolved profile `name`: a path of a TOML file, or a name in deployments/.

    Raises ConfigError for a missing file, TOML that does not parse, and any name or value that is wrong.
    """
    path = find_profile(name)
    raw = _read_toml(path)
    _key_partitions_by_name(raw, path)
    origins: dict[tuple[str, ...], str] = {}
    for variable, value in sorted((environ if environ is not None else os.environ).items()):
        if variable.upper().startswith(ENV_PREFIX):
            dotted = variable[len(ENV_PREFIX) :].split("__")
            what = f"environment variable {variable}"
            origins[_set(raw, dotted, value, what)] = what
    for override in overrides:
        dotted_text, eq, value = override.partition("=")
        if not eq:
            raise ConfigError(f"--set {override}: expected name=value, for example server.port=8000.")
        what = f"--set {override}"
        origins[_set(raw, dotted_text.split("."), value, what)] = what
    try:
        return Profile(**raw)
    except ValidationError as error:
        raise ConfigError(_explain(error, raw, origins, f"Profile {path}")) from None


def find_profile(name: str) -> Path:
    """The file that `name` stands for. Raises ConfigError, naming the profiles that exist."""
    if name.endswith(".toml") or os.sep in name:
        if Path(name).is_file():
            return Path(name)
        raise ConfigError(f"Profile {name}: no such file.")
    folders = [Path("deployments"), Path(__file__).resolve().parent.parent / "deployments"]
    for folder in folders:
        if (path := folder / f"{name}.toml").is_file():
            return path
    known = sorted({p.stem for folder in folders for p in folder.glob("*.toml")})
    raise ConfigError(
        f"Profile {name!r}: there is no deployments/{name}.toml. Known: {', '.join(known) or 'none'}; "
        "the path of a TOML file works too."
    )


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"Profile {path} is not valid TOML: {error}.") from None
    except OSError as error:
        raise ConfigError(f"Profile {path} cannot be read: {error.strerror}.") from None


def _key_partitions_by_name(raw: dict[str, Any], path: Path) -> None:
    """Turn the list of partitions into a table keyed by name, so that layers merge by name."""
    listed = raw.get("partitions")
    if listed is None:
        return
    if not isinstance(listed, list) or not all(isinstance(p, dict) for p in listed):
        raise ConfigError(f"Profile {path}: partitions are written as [[partitions]] tables.")
    table: dict[str, Any] = {}
    for i, part in enumerate(listed):
        name = part.pop("name", None)
        if not isinstance(name, str):
            raise ConfigError(f"Profile {path}: partition {i + 1} has no name.")
        if name in table:
            raise ConfigError(f"Profile {path}: two partitions are named {name!r}.")
        table[name] = part
    raw["partitions"] = table


def _set(raw: dict[str, Any], dotted: list[str], text: str, what: str) -> tuple[str, ...]:
    """Set one value in `raw`; returns its real path. Raises ConfigError for a path that no setting has."""
    path: list[str] = []
    here: dict[str, Any] = raw
    model: Any = Profile
    for depth, part in enumerate(dotted):
        key, model = _step(model, part, here, what)
        path.append(key)
        if depth == len(dotted) - 1:
            if _as_model(model) is not None or model == dict[str, PartitionSettings]:
                raise ConfigError(f"{what}: {'.'.join(dotted)} is a table; name a setting inside it.")
            here[key] = _parse(text, model)
            break
        below = here.setdefault(key, {})
        if not isinstance(below, dict):
            raise ConfigError(f"{what}: {'.'.join(dotted[: depth + 1])} is not a table.")
        here = below
    return tuple(path)


def _step(model: Any, part: str, here: Mapping[str, Any], what: str) -> tuple[str, Any]:
    """The real key and the type that `part` names below `model`."""
    fields = _as_model(model)
    if fields is not None:
        names = {info.alias or name: info.annotation for name, info in fields.items()}
        key = _match(part, names)
        if key is None:
            raise ConfigError(f"{what}: there is no setting {part!r}.{_did_you_mean(part, names)}")
        if key == "partitions":
            return key, dict[str, PartitionSettings]
        return key, names[key]
    if typing.get_origin(model) is dict:
        value_type = typing.get_args(model)[1]
        key = _match(part, here)
        if key is None and value_type is PartitionSettings:
            raise ConfigError(f"{what}: there is no partition {part!r}.{_did_you_mean(part, here)}")
        if key is None:  # a new name; those of the environment are upper-case, as in server.env
            key = part.lower() if part.isupper() and value_type is not str else part
        return key, value_type
    raise ConfigError(f"{what}: nothing has a name below a plain value ({part!r}).")


def _as_model(annotation: Any) -> Mapping[str, Any] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation.model_fields
    return None


def _match(part: str, names: Iterable[str]) -> str | None:
    """The name that `part` means: exactly, or regardless of case and of - against _."""

    def fold(name: str) -> str:
        return name.lower().replace("-", "_")

    exact = [name for name in names if name == part]
    return next(iter(exact or [name for name in names if fold(name) == fold(part)]), None)


def _did_you_mean(part: str, names: Iterable[str]) -> str:
    close = difflib.get_close_matches(part.lower(), list(names), n=1, cutoff=0.5)
    return f" Did you mean {close[0]!r}?" if close else f" Known: {', '.join(sorted(names))}."


def _parse(text: str, annotation: Any) -> object:
    """`text` as TOML where the setting is not plain text itself."""
    options = typing.get_args(annotation) if isinstance(annotation, types.UnionType) else (annotation,)
    if str in options and len([o for o in options if o is not type(None)]) == 1:
        return text
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def _explain(
    error: ValidationError, raw: Mapping[str, Any], origins: Mapping[tuple[str, ...], str], file: str
) -> str:
    """One sentence a mistake: who said it, unless that was said before, the setting's name, what is wrong."""
    said, lines = "", []
    for mistake in error.errors(include_url=False):
        origin = _origin(mistake["loc"], raw, origins) or file
        lines.append(_sentence(mistake) if origin == said else f"{origin}: {_sentence(mistake)}")
        said = origin
    return " ".join(lines)


def _origin(
    location: tuple[int | str, ...], raw: Mapping[str, Any], origins: Mapping[tuple[str, ...], str]
) -> str | None:
    """What set the value at `location`, if it was not the file; partitions are numbered there."""
    path = list(location)
    if len(path) > 1 and path[0] == "partitions" and isinstance(path[1], int):
        path[1] = list(raw["partitions"])[path[1]]
    wanted = tuple(str(part) for part in path)
    return next((what for end in range(len(wanted), 0, -1) if (what := origins.get(wanted[:end]))), None)


def _sentence(mistake: ErrorDetails) -> str:
    where = ".".join(str(part) for part in mistake["loc"])
    if mistake["type"] == "extra_forbidden":
        known = _names_at(mistake["loc"][:-1])
        return f"there is no setting {where!r}.{_did_you_mean(str(mistake['loc'][-1]), known)}"
    if mistake["type"] == "missing":
        return f"{where} is missing."
    if mistake["type"] == "value_error" and not where:
        return mistake["msg"].removeprefix("Value error, ") + "."
    if mistake["type"] == "string_pattern_mismatch" and mistake["loc"][-1] == "name":
        return f"{where}: a name is letters, digits, '.', '_' and '-', not {mistake['input']!r}."
    return f"{where}: {mistake['msg']} (it is {mistake['input']!r})."


def _names_at(location: tuple[int | str, ...]) -> list[str]:
    model: Any = Profile
    for part in location:
        if isinstance(part, int):
            model = typing.get_args(model)[0]
        elif (fields := _as_model(model)) is not None:
            by_alias = {info.alias or name: info.annotation for name, info in fields.items()}
            model = by_alias[part]
        else:
            model = typing.get_args(model)[1]
    fields = _as_model(model) or {}
    return [info.alias or name for name, info in fields.items()]
