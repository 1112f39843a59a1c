"""Files of prompts that lie elsewhere: in S3, and in data sets of the Hugging Face hub.

They are listed, told apart by what the other side has for a checksum, and read as a stream. Credentials come
from the ordinary AWS chain and the hub's own log-in. Without a network a data set is read from the hub's
cache, where it lies.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Any

from promptmill.errors import ConfigError
from promptmill.model import hub_client_error
from promptmill.store.objects import s3_filesystem

SCHEMES = ("s3", "hf")
_BLOCK = 8 << 20
_HUB = re.compile(r"hf://(?P<root>datasets/[^/@]+/[^/@]+(?:@[^/]+)?)(?:/(?P<path>.*))?")


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """One file elsewhere; as text its address."""

    address: str
    stamp: str
    """Changes with its content."""
    size: int
    opened: Callable[[], IO[bytes]]

    def __str__(self) -> str:
        return self.address

    def open(self, mode: str = "rb") -> IO[bytes]:
        """A seekable stream. What goes wrong is the other side's error; see `translated`."""
        return self.opened()


def list_files(source: str) -> list[RemoteFile]:
    """The files at `source`, a file, a folder or a glob; sorted, of every kind. Raises ConfigError."""
    scheme = source.partition("://")[0]
    with translated(source):
        return _in_s3(source) if scheme == "s3" else _on_hub(source)


def is_glob(path: str) -> bool:
    return any(character in path for character in "*?[")


@contextmanager
def translated(source: object) -> Iterator[None]:
    """What the libraries raise, as a ConfigError that names the source."""
    from botocore.exceptions import BotoCoreError, ClientError
    from huggingface_hub.errors import HFValidationError

    try:
        yield
    except FileNotFoundError as error:
        said = str(error).strip() or "there is no such file"
        raise ConfigError(
            f"source {source}: nothing is there, or it is not for you to see: {said}."
        ) from None
    except (OSError, BotoCoreError, ClientError, hub_client_error(), HFValidationError) as error:
        first = next(iter(str(error).strip().splitlines()), "")
        raise ConfigError(f"source {source}: cannot be read: {type(error).__name__}: {first}.") from None


def _in_s3(source: str) -> list[RemoteFile]:
    path = source.removeprefix("s3://").strip("/")
    if "/" not in path:
        raise ConfigError(f"source {source!r}: name a bucket and what is in it (s3://bucket/path).")
    return _listed(s3_filesystem(), path, lambda name: f"s3://{name}", lambda info: str(info.get("ETag")))


def _on_hub(source: str) -> list[RemoteFile]:
    found = _HUB.fullmatch(source)
    if not found:
        raise ConfigError(f"source {source!r}: a data set is hf://datasets/owner/name[@revision][/path].")
    from huggingface_hub import HfFileSystem, constants
    from huggingface_hub.errors import HfHubHTTPError

    root, path = found["root"], (found["path"] or "").strip("/")
    if not constants.HF_HUB_OFFLINE:
        try:
            fs = HfFileSystem(skip_instance_cache=True)  # else it remembers what it listed
            return _listed(fs, f"{root}/{path}".rstrip("/"), _hub_address(root), _blob)
        except (hub_client_error(), ConnectionError) as error:
            if isinstance(error, HfHubHTTPError):  # the hub was reached, and said no
                raise
    return _in_cache(source, root, path)


def _hub_address(root: str) -> Callable[[str], str]:
    """Names as the hub lists them have its default revision in them."""
    return lambda name: f"hf://{root}/{re.sub(r'^datasets/[^/]+/[^/]+/', '', name)}"


def _in_cache(source: str, root: str, path: str) -> list[RemoteFile]:
    """The same files out of the hub's cache. Raises ConfigError where the data set is not there."""
    repo, _, revision = root.removeprefix("datasets/").partition("@")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        folder = Path(
            snapshot_download(repo, repo_type="dataset", revision=revision or None, local_files_only=True)
        )
    except (LocalEntryNotFoundError, FileNotFoundError):
        raise ConfigError(
            f"source {source!r}: the hub cannot be reached, and its cache does not hold the data set. "
            f"Where there is a network: hf download {repo} --repo-type dataset."
        ) from None
    if is_glob(path):
        found = [file for file in folder.glob(path) if file.is_file()]
    else:
        there = folder / path
        found = [there] if there.is_file() else [file for file in there.rglob("*") if file.is_file()]
    if not found:
        raise FileNotFoundError(f"{path or 'a file'}, in the hub's cache")
    return [_cached(file, f"{root}/{file.relative_to(folder)}") for file in sorted(found)]


def _cached(file: Path, name: str) -> RemoteFile:
    """In the cache a file is a link to its blob, which has the checksum for its name."""
    return RemoteFile(f"hf://{name}", file.resolve().name, file.stat().st_size, lambda: file.open("rb"))


def _blob(info: dict[str, Any]) -> str:
    """What the hub's cache has for a file's name: its sha256, or git's for a small one."""
    return str(info["lfs"]["sha256"] if info.get("lfs") else info.get("blob_id"))


def _listed(
    fs: Any, path: str, address: Callable[[str], str], stamp: Callable[[dict[str, Any]], str]
) -> list[RemoteFile]:
    if is_glob(path):
        found = fs.glob(path, detail=True)
    else:
        about = fs.info(path)
        found = fs.find(path, detail=True) if about["type"] == "directory" else {path: about}
    files = [(name, info) for name, info in sorted(found.items()) if info["type"] == "file"]
    return [
        RemoteFile(
            address(name),
            stamp(info),
            int(info.get("size") or 0),
            partial(fs.open, name, "rb", block_size=_BLOCK),
        )
        for name, info in files
    ]
