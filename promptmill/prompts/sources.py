"""Files of prompts: which there are, and whether they are what they were. Reading them is for `readers`."""

from __future__ import annotations

import glob
import hashlib
import json
from collections.abc import Iterable, Sequence
from pathlib import Path, PurePath

from promptmill.errors import ConfigError
from promptmill.prompts import remote
from promptmill.prompts.remote import RemoteFile

SUFFIXES = (".jsonl", ".json", ".ndjson", ".parquet")
COMPRESSED = (".gz", ".zst")

File = Path | RemoteFile
"""What has an `open("rb")`, and an address as its text."""


def list_files(source: str) -> Sequence[File]:
    """The files of `source`: a file, a directory (searched through) or a glob, here or elsewhere; sorted.

    Raises ConfigError where there is none.
    """
    scheme, separator, _ = source.partition("://")
    if separator and scheme not in remote.SCHEMES:
        raise ConfigError(f"source {source!r}: local paths, s3:// and hf:// can be read, no {scheme}://.")
    found, problem = _elsewhere(source) if separator else _here(source)
    if not found:
        raise ConfigError(f"source {source!r}: {problem}.")
    return found


def fingerprint(files: Iterable[File]) -> str:
    """Changes when a file is added, removed, renamed, resized or rewritten; contents are not read."""
    return hashlib.sha256(json.dumps([_stamp(file) for file in files]).encode()).hexdigest()


def _stamp(file: File) -> tuple[str, int, int | str]:
    if isinstance(file, RemoteFile):
        return file.address, file.size, file.stamp
    return str(file), (stat := file.stat()).st_size, stat.st_mtime_ns


def _here(source: str) -> tuple[list[Path], str]:
    """The files, and what to say where there are none."""
    path = Path(source)
    if path.is_dir():
        inside = (p for p in sorted(path.rglob("*")) if p.is_file())
        return [p for p in inside if _is_prompt_file(p.relative_to(path))], _no_prompt_file("directory")
    if remote.is_glob(source) and not path.is_file():
        found = [Path(p) for p in sorted(glob.glob(source, recursive=True)) if Path(p).is_file()]  # noqa: PTH207  a source is a whole pattern, not a pattern below a folder
        return found, "no file matches"
    missing = "there is no such file or directory" + ("" if path.is_absolute() else f" in {Path.cwd()}")
    return [path] if path.is_file() else [], missing


def _elsewhere(source: str) -> tuple[list[RemoteFile], str]:
    found = remote.list_files(source)
    if remote.is_glob(source):
        return found, "no file matches"
    root = source.rstrip("/") + "/"
    if [file.address for file in found] == [source]:
        return found, ""
    inside = [file for file in found if _is_prompt_file(PurePath(file.address.removeprefix(root)))]
    return inside, _no_prompt_file("place")


def _no_prompt_file(where: str) -> str:
    return f"the {where} holds no prompt file ({', '.join(SUFFIXES)}, also with .gz or .zst)"


def _is_prompt_file(path: PurePath) -> bool:
    """Whether a file in a folder is one of prompts; one that is named is taken whatever its name."""
    name = path.name.lower()
    for ending in COMPRESSED:
        name = name.removesuffix(ending)
    return name.endswith(SUFFIXES) and not any(part.startswith(".") for part in path.parts)
