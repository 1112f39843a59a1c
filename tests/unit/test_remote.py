"""Data sets of the hub: from a small hub on loopback, and from its cache where there is no network."""

from __future__ import annotations

import gzip
import hashlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from helpers import make_profile
from huggingface_hub import constants

from promptmill.errors import ConfigError
from promptmill.model import resolve_model
from promptmill.prompts.readers import RawRow, read_rows
from promptmill.prompts.sources import fingerprint, list_files

REPO = "team/prompts"
COMMIT = "c0ffee" + "0" * 34
ROOT = f"hf://datasets/{REPO}"


def parquet(rows: list[dict[str, Any]]) -> bytes:
    sink = pa.BufferOutputStream()
    pq.write_table(pa.Table.from_pylist(rows), sink)
    return bytes(sink.getvalue())


FILES = {
    "README.md": b"# Prompts\n",
    "data/a.jsonl.gz": gzip.compress(b'{"id": "a1", "prompt": "one"}\n{"id": "a2", "prompt": "two"}\n'),
    "data/b.parquet": parquet([{"id": "b1", "prompt": "three"}]),
    "data/.hidden.jsonl": b"{}\n",
}


def blob(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


class Hub(BaseHTTPRequestHandler):
    """As much of the hub's HTTP as listing and reading a data set takes."""

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        api, files = f"/api/datasets/{REPO}", f"/datasets/{REPO}/resolve/main/"
        if path.startswith(files):
            self._file(FILES.get(path.removeprefix(files)))
        elif path in (api, f"{api}/revision/main"):
            self._json({"id": REPO, "sha": COMMIT, "private": False, "tags": [], "downloads": 0, "likes": 0})
        elif path.startswith(f"{api}/tree/main"):
            self._json(
                self._tree(
                    path.removeprefix(f"{api}/tree/main").strip("/"), "recursive=true" in self.path.lower()
                )
            )
        else:
            self._missing("RepoNotFound")

    do_HEAD = do_GET

    def _tree(self, folder: str, recursive: bool) -> list[dict[str, Any]]:
        inside = {
            name: data for name, data in FILES.items() if name.startswith(f"{folder}/" if folder else "")
        }
        found: dict[str, dict[str, Any]] = {}
        for name, data in inside.items():
            rest = name.removeprefix(folder).strip("/")
            if "/" in rest:
                sub = f"{folder}/{rest.split('/')[0]}".strip("/")
                found[sub] = {"type": "directory", "path": sub, "oid": "0" * 40, "size": 0}
            if recursive or "/" not in rest:
                lfs = {"oid": blob(data), "size": len(data), "pointerSize": 100}
                found[name] = {
                    "type": "file",
                    "path": name,
                    "oid": blob(data)[:40],
                    "size": len(data),
                    "lfs": lfs,
                }
        return list(found.values())

    def _json(self, value: Any) -> None:
        self._send(200, json.dumps(value).encode())

    def _file(self, data: bytes | None) -> None:
        if data is None:
            self._missing("EntryNotFound")
        elif wanted := self.headers.get("Range"):
            first, last = wanted.removeprefix("bytes=").split("-")
            self._send(206, data[int(first) : int(last) + 1])
        else:
            self._send(200, data)

    def _missing(self, what: str) -> None:
        self.send_response(404)
        self.send_header("X-Error-Code", what)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def _send(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    address = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setattr(constants, "ENDPOINT", address)
    template = f"{address}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    yield
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The hub's cache with the data set in it, and no network."""
    repo = tmp_path / "hub" / f"datasets--{REPO.replace('/', '--')}"
    for name, data in FILES.items():
        store, link = repo / "blobs" / blob(data), repo / "snapshots" / COMMIT / name
        for path in (store, link, repo / "refs" / "main"):
            path.parent.mkdir(parents=True, exist_ok=True)
        store.write_bytes(data)
        link.symlink_to(store)
    (repo / "refs" / "main").write_text(COMMIT)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    return repo


def prompts(source: str) -> dict[str, Any]:
    rows = read_rows(list_files(source))
    return {row.location: row.data["prompt"] for row in rows if isinstance(row, RawRow)}


WHOLE = {
    f"{ROOT}/data/a.jsonl.gz:1": "one",
    f"{ROOT}/data/a.jsonl.gz:2": "two",
    f"{ROOT}/data/b.parquet:1": "three",
}
A, B = f"{ROOT}/data/a.jsonl.gz", f"{ROOT}/data/b.parquet"


@pytest.mark.parametrize("where", ["hub", "cache"])
def test_data_set_is_read_whole_by_folder_by_file_and_by_glob(
    where: str, request: pytest.FixtureRequest
) -> None:
    request.getfixturevalue(where)
    assert prompts(ROOT) == prompts(f"{ROOT}/") == prompts(f"{ROOT}/data") == WHOLE
    assert [str(file) for file in list_files(f"{ROOT}/data/*.parquet")] == [B]
    assert prompts(A) == {k: v for k, v in WHOLE.items() if k.startswith(A)}
    assert list(prompts(f"{ROOT}@main/data/b.parquet")) == [f"{ROOT}@main/data/b.parquet:1"]


def test_fingerprint_is_of_the_content_and_the_same_with_and_without_a_network(
    hub: None, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    online = fingerprint(list_files(ROOT))
    assert fingerprint(list_files(ROOT)) == online
    request.getfixturevalue("cache")
    assert fingerprint(list_files(ROOT)) == online
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setitem(FILES, "data/b.parquet", parquet([{"id": "b1", "prompt": "other"}]))
    assert fingerprint(list_files(ROOT)) != online


@pytest.mark.parametrize(
    ("source", "said"),
    [
        (f"{ROOT}/data/none.jsonl", "nothing is there"),
        (f"{ROOT}/none/*.jsonl", "nothing is there"),
        (f"{ROOT}/README.md/x", "nothing is there"),
        ("hf://datasets/team/other", "nothing is there"),
        ("hf://models/team/prompts", r"a data set is hf://datasets/owner/name"),
        ("hf://datasets/prompts", r"a data set is hf://datasets/owner/name"),
        ("s3://bucket", r"name a bucket and what is in it"),
        ("ftp://host/a.jsonl", r"local paths, s3:// and hf:// can be read, no ftp://"),
    ],
)
def test_source_that_is_not_there_is_said(hub: None, source: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said) as caught:
        list_files(source)
    assert source in str(caught.value)


def test_data_set_that_is_not_in_the_cache_says_how_it_gets_there(cache: Path) -> None:
    with pytest.raises(ConfigError, match=r"hf download team/other --repo-type dataset"):
        list_files("hf://datasets/team/other")
    with pytest.raises(ConfigError, match=r"hf download"):
        list_files(f"{ROOT}@other-branch")


def test_file_that_goes_while_it_is_read_is_said(hub: None, monkeypatch: pytest.MonkeyPatch) -> None:
    files = list_files(A)
    monkeypatch.delitem(FILES, "data/a.jsonl.gz")
    with pytest.raises(ConfigError, match=r"a\.jsonl\.gz"):
        list(read_rows(files))


def test_model_that_is_looked_for_on_a_hub_that_cannot_be_reached_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")  # nobody listens there
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    with pytest.raises(ConfigError, match="neither a local path nor found on the hub"):
        resolve_model(make_profile(model="team/model"))
