"""A local folder of objects: whole or not there."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from promptmill.errors import ConfigError, StoreError
from promptmill.store import objects
from promptmill.store.objects import LocalFolder, open_folder


@pytest.fixture
def folder(tmp_path: Path) -> LocalFolder:
    return LocalFolder(str(tmp_path / "objects"))


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "source"
    path.write_bytes(b"x" * 3_000_000)
    return path


def test_put_file_is_read_listed_and_deleted(folder: LocalFolder, source: Path) -> None:
    folder.put_file(source, "a/b/c.parquet")
    folder.put_bytes(b"{}", "latest.json")
    assert folder.names() == ["a/b/c.parquet", "latest.json"]
    assert folder.names("a") == ["a/b/c.parquet"]
    assert folder.read_bytes("a/b/c.parquet") == source.read_bytes()
    assert folder.address("latest.json") == f"{folder.url}/latest.json"
    folder.delete("latest.json")
    folder.delete("latest.json")
    assert folder.read_bytes("latest.json") is None
    assert folder.names() == ["a/b/c.parquet"]


def test_names_of_a_folder_that_is_not_there_is_empty(folder: LocalFolder) -> None:
    assert folder.names("segments") == []
    assert not folder.path.exists()


def test_put_file_shows_the_object_whole_or_not_at_all(
    folder: LocalFolder, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder.put_bytes(b"before", "name")
    half, go_on = threading.Event(), threading.Event()
    copy = objects.shutil.copyfileobj

    def slowly(src: Any, dst: Any, length: int = 0) -> None:
        dst.write(src.read(1_000_000))
        dst.flush()
        half.set()
        assert go_on.wait(20)
        copy(src, dst)

    monkeypatch.setattr(objects.shutil, "copyfileobj", slowly)
    putting = [threading.Thread(target=folder.put_file, args=(source, n)) for n in ("name", "new")]
    for thread in putting:
        half.clear()
        thread.start()
        assert half.wait(20)
        assert folder.names() == ["name"]
        assert folder.read_bytes("name") == b"before"
        assert folder.read_bytes("new") is None
    go_on.set()
    for thread in putting:
        thread.join(20)
    assert folder.read_bytes("name") == folder.read_bytes("new") == source.read_bytes()
    assert sorted(p.name for p in folder.path.iterdir()) == ["name", "new"]


def test_put_file_that_fails_leaves_what_was_there_and_no_scrap(
    folder: LocalFolder, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder.put_bytes(b"before", "name")

    def full(src: Any, dst: Any, length: int = 0) -> None:
        dst.write(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(objects.shutil, "copyfileobj", full)
    with pytest.raises(StoreError, match="name: No space left on device"):
        folder.put_file(source, "name")
    assert [p.name for p in folder.path.iterdir()] == ["name"]
    assert folder.read_bytes("name") == b"before"


def test_put_file_below_a_file_is_a_store_error(folder: LocalFolder, source: Path) -> None:
    folder.put_bytes(b"", "a")
    with pytest.raises(StoreError, match="objects/a/b"):
        folder.put_file(source, "a/b")


def test_probe_of_a_good_folder_leaves_nothing(folder: LocalFolder) -> None:
    folder.probe()
    assert list(folder.path.iterdir()) == []


def test_probe_names_the_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="file/store cannot be written to"):
        LocalFolder(str(tmp_path / "file/store")).probe()


@pytest.mark.parametrize("address", ["gs://bucket/x", "http://host/x", "hf://datasets/a/b"])
def test_open_folder_refuses_an_unknown_kind_and_says_what_to_use(address: str) -> None:
    with pytest.raises(ConfigError, match=f"{address}: use a local directory or s3://"):
        open_folder(address)


def test_open_folder_refuses_s3_without_a_bucket() -> None:
    with pytest.raises(ConfigError, match="bucket"):
        open_folder("s3://")
