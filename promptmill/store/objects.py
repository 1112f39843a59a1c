"""A folder of whole objects, on a local disk or in S3: `open_folder("data/store")`, `"s3://bucket/prefix"`.

An object is written locally first, then put under its name in one step: a half-written one is never seen.
Listings are never cached; s3fs does so by default and then hides new objects and shows removed ones.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, TypeVar, cast

from promptmill.errors import ConfigError, StoreError
from promptmill.files import sync_folder
from promptmill.store.s3_hints import hint

T = TypeVar("T")


class Folder(ABC):
    """Objects by name (with `/` inside), below one address. Every method raises StoreError."""

    url: str

    @abstractmethod
    def put_file(self, local: Path, name: str) -> None:
        """Publish a local file; when this returns, the whole object stands there and was checked."""

    @abstractmethod
    def open(self, name: str) -> IO[bytes]:
        """A seekable binary stream. Raises FileNotFoundError."""

    @abstractmethod
    def names(self, prefix: str = "") -> list[str]:
        """Names of all objects below `prefix` (a folder), sorted."""

    @abstractmethod
    def delete(self, name: str) -> None:
        """Remove an object; one that is not there is no error."""

    def put_bytes(self, data: bytes, name: str) -> None:
        """Publish `data` as an object."""
        with tempfile.NamedTemporaryFile() as file:
            file.write(data)
            file.flush()
            self.put_file(Path(file.name), name)

    def read_bytes(self, name: str) -> bytes | None:
        """An object's content, or None where there is none."""
        try:
            with self.open(name) as file:
                return file.read()
        except FileNotFoundError:
            return None

    def address(self, name: str) -> str:
        return f"{self.url.rstrip('/')}/{name}"

    def probe(self) -> None:
        """Write, read, list and delete one object. Raises ConfigError, saying which of them failed."""
        name, content, step = f".probe-{uuid.uuid4().hex}", b"promptmill", "written to"
        try:
            self.put_bytes(content, name)
            step = "read"
            if self.read_bytes(name) != content:
                raise StoreError("the object that was written came back changed")
            step = "listed"
            self.names()
            step = "deleted from"
            self.delete(name)
        except (StoreError, OSError) as error:
            raise ConfigError(f"{self.url} cannot be {step}: {error}") from None


def open_folder(url: str) -> Folder:
    """Raises ConfigError for an address of an unknown kind, and a path on which a file stands."""
    scheme, separator, _ = url.partition("://")
    if not separator:
        there = next((path for path in (Path(url), *Path(url).parents) if path.exists()), None)
        if there is not None and not there.is_dir():
            raise ConfigError(f"{url}: {there} is a file, and no directory.")
        return LocalFolder(url)
    if scheme == "s3":
        return S3Folder(url)
    raise ConfigError(f"{url}: use a local directory or s3://bucket/prefix.")


class LocalFolder(Folder):
    """A directory."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.path = Path(url)

    def put_file(self, local: Path, name: str) -> None:
        target = self.path / name
        scratch = target.with_name(f".writing-{uuid.uuid4().hex}")
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            with local.open("rb") as source, scratch.open("wb") as copy:
                shutil.copyfileobj(source, copy, 1 << 20)
                _sync(copy)
            scratch.replace(target)
            sync_folder(target.parent)
        except OSError as error:
            raise StoreError(f"{target}: {error.strerror or error}") from error
        finally:
            with suppress(OSError):  # not there, or its folder is none
                scratch.unlink()

    def open(self, name: str) -> IO[bytes]:
        return (self.path / name).open("rb")

    def names(self, prefix: str = "") -> list[str]:
        found = (p.relative_to(self.path) for p in (self.path / prefix).rglob("*") if p.is_file())
        return sorted(str(p) for p in found if not any(part.startswith(".writing-") for part in p.parts))

    def delete(self, name: str) -> None:
        (self.path / name).unlink(missing_ok=True)


def s3_filesystem() -> Any:
    """Through s3fs, with nothing that it lists or opens kept for later."""
    import s3fs

    return s3fs.S3FileSystem(use_listings_cache=False, skip_instance_cache=True)


class S3Folder(Folder):
    """A bucket and prefix, through s3fs. Credentials come from the ordinary AWS chain, never from us."""

    def __init__(self, url: str) -> None:
        self.url = url
        self._root = url.removeprefix("s3://").strip("/")
        if not self._root:
            raise ConfigError(f"{url}: a bucket is missing (s3://bucket/prefix).")
        self._fs = s3_filesystem()

    def put_file(self, local: Path, name: str) -> None:
        path = self._path(name)
        self._call(name, lambda: self._fs.put_file(str(local), path))
        if self._call(name, lambda: _digest(self._fs.open(path, "rb"))) != _digest(local.open("rb")):
            raise StoreError(f"{self.address(name)}: what arrived differs from what was sent")

    def open(self, name: str) -> IO[bytes]:
        return cast(IO[bytes], self._call(name, lambda: self._fs.open(self._path(name), "rb")))

    def names(self, prefix: str = "") -> list[str]:
        below = f"{self._root}/{prefix}".rstrip("/")
        found = self._call(prefix, lambda: self._fs.find(below))
        # Where nothing is left, s3fs gives the folder itself; a name that ends in / only stands for a folder.
        objects = (path for path in found if path.startswith(f"{below}/") and not path.endswith("/"))
        return sorted(path.removeprefix(f"{self._root}/") for path in objects)

    def delete(self, name: str) -> None:
        try:
            self._call(name, lambda: self._fs.rm_file(self._path(name)))
        except FileNotFoundError:
            return

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}"

    def _call(self, name: str, action: Callable[[], T]) -> T:
        """Run one s3fs call; what it raises becomes a StoreError that names the object."""
        from botocore.exceptions import BotoCoreError, ClientError

        try:
            return action()
        except FileNotFoundError as error:
            if not self._bucket_exists():
                raise StoreError(f"{self.address(name)}: the bucket does not exist") from error
            raise
        except (BotoCoreError, ClientError, OSError) as error:
            said = f"{type(error).__name__}: {error}"
            raise StoreError(f"{self.address(name)}: {said}{hint(said)}") from error

    def _bucket_exists(self) -> bool:
        try:
            return bool(self._fs.exists(self._root.split("/")[0]))
        except OSError:
            return False


def _sync(file: IO[bytes]) -> None:
    file.flush()
    os.fsync(file.fileno())


def _digest(file: Any) -> str:
    with file:
        return hashlib.file_digest(file, "sha256").hexdigest()
