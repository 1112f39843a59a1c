from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import yaml
from helpers import MODEL, make_answer, make_preparation, write_lines

from promptmill.chat import ChatRenderer
from promptmill.errors import ReleaseError, ReleaseRefused
from promptmill.prompts.manifest import prepare, read_keys
from promptmill.release import dataset
from promptmill.release.dataset import Release, publish, read_back
from promptmill.settings import Profile
from promptmill.store.store import Store
from promptmill.types import Manifest

TEXTS = ("a", "b", "c", "d")


class Mill:
    """A store with answers to partition A, to be published."""

    def __init__(self, folder: Path, renderer: ChatRenderer) -> None:
        source = write_lines(folder / "a.jsonl", [{"id": t, "prompt": t} for t in TEXTS])
        preparation = make_preparation(
            source,
            renderer,
            store={"url": str(folder / "store")},
            release={"url": str(folder / "release")},
            server={"env": {"HF_TOKEN": "hf_secret"}},
        )
        self.profile: Profile = preparation.profile
        self.renderer = renderer
        self.manifest: Manifest = prepare(preparation)
        self.folder = folder / "release"
        self.store = Store(self.profile)
        self.store.open("test")

    def answer(self, *which: int, **changes: Any) -> None:
        hashes = [chain[0] for (chain,) in read_keys(self.manifest)]
        for i in which:
            self.store.put(make_answer(hashes[i], content=TEXTS[i] * 40, **changes)).result()

    def publish(self, **release: Any) -> Release:
        settings = self.profile.release.model_copy(update=release)
        profile = self.profile.model_copy(update={"release": settings})
        tally = self.store.tally(self.manifest)
        return publish(profile, self.store, MODEL, self.renderer, [self.manifest], [tally])

    def pointer(self) -> dict[str, Any]:
        return dict(json.loads((self.folder / "latest.json").read_text()))

    def revisions(self) -> list[str]:
        return sorted(path.name for path in self.folder.iterdir() if path.is_dir())


@pytest.fixture
def mill(tmp_path: Path, renderer: ChatRenderer) -> Iterator[Mill]:
    mill = Mill(tmp_path, renderer)
    yield mill
    mill.store.close()


@pytest.fixture
def unread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leaves out the reading back, which takes seconds in a process of its own."""
    monkeypatch.setattr(dataset, "read_back", lambda folder, rows: None)


def broken(*_: Any) -> None:
    raise ReleaseError("the staged release does not load")


@pytest.mark.usefixtures("unread")
def test_release_is_pointed_to(mill: Mill) -> None:
    mill.answer(0, 1)
    mill.answer(2, status="truncated", finish_reason="length", max_new_tokens=2048)
    mill.answer(3, status="failed", output_ids=[])
    release = mill.publish()
    assert (release.new, release.rows) == (True, {"conversations": 2, "turns": 3})
    assert mill.pointer()["revision"] == release.revision
    assert Path(mill.pointer()["path"]) == mill.folder / release.revision


@pytest.mark.usefixtures("unread")
def test_release_is_loaded_back_view_by_view(mill: Mill) -> None:
    mill.answer(0, 1, 2)
    release = mill.publish(allow_incomplete=True)
    with pytest.raises(ReleaseError, match="AssertionError: turns: 3 rows instead of 4"):
        read_back(mill.folder / release.revision, {"conversations": 3, "turns": 4})


@pytest.mark.usefixtures("unread")
def test_release_describes_its_files(mill: Mill) -> None:
    mill.answer(0, 1, 2, 3)
    folder = mill.folder / mill.publish().revision
    manifest = json.loads((folder / "manifest.json").read_text())
    found = {str(p.relative_to(folder)): p for p in folder.glob("data/**/*.parquet")}
    assert found.keys() == {f"data/{view}/A-00000-of-00001.parquet" for view in ("conversations", "turns")}
    assert manifest["files"] == {
        name: {
            "rows": 4,
            "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
            "bytes": path.stat().st_size,
        }
        for name, path in found.items()
    }
    assert manifest["rows"] == {"conversations": 4, "turns": 4}
    assert manifest["accounting"]["A"]["answered"] == manifest["accounting"]["A"]["rows"] == 4
    assert manifest["renderer"] == mill.renderer.describe()
    assert manifest["partitions"] == {
        "A": {"mode": "last_turn", "renderer": mill.renderer.describe()["fingerprint"]}
    }
    assert manifest["profile"]["server"]["env"] == {"HF_TOKEN": "***"}
    card = yaml.safe_load((folder / "README.md").read_text().split("---\n")[1])
    assert [config["config_name"] for config in card["configs"]] == ["conversations", "turns"]


@pytest.mark.usefixtures("unread")
def test_release_of_the_same_rows_is_not_new(mill: Mill) -> None:
    mill.answer(0, 1, 2, 3)
    first = mill.publish()
    mill.store.seal_all()
    assert mill.publish() == Release(first.revision, first.address, False, first.rows)
    assert mill.revisions() == [first.revision]


def unreadable(*_: Any) -> None:
    raise AssertionError("answers were read")


@pytest.mark.usefixtures("unread")
def test_release_of_a_store_without_news_reads_no_answer(mill: Mill, monkeypatch: pytest.MonkeyPatch) -> None:
    mill.answer(0, 1, 2, 3)
    mill.store.seal_all()
    first = mill.publish()
    with monkeypatch.context() as patch:
        patch.setattr(Store, "lookup", unreadable)
        assert mill.publish() == Release(first.revision, first.address, False, first.rows)
        for change in ({"views": ["turns"]}, {"shard_mb": 1}):
            with pytest.raises(AssertionError, match="answers were read"):
                mill.publish(**change)
    assert mill.publish(views=["turns"]).new
    assert mill.publish().new, "what is in force is another one now"


@pytest.mark.usefixtures("unread")
@pytest.mark.parametrize("news", ["sealed answer", "journaled answer", "prompts"])
def test_release_after_news_reads_the_answers(mill: Mill, monkeypatch: pytest.MonkeyPatch, news: str) -> None:
    mill.answer(0, 1, 2, 3)
    mill.store.seal_all()
    mill.publish()
    if news == "prompts":
        os.utime(mill.manifest.path, (1, 1))
    else:
        mill.store.put(make_answer("f" * 64)).result()
    if news == "sealed answer":
        mill.store.seal_all()
    with monkeypatch.context() as patch:
        patch.setattr(Store, "lookup", unreadable)
        with pytest.raises(AssertionError, match="answers were read"):
            mill.publish()
    assert not mill.publish().new


@pytest.mark.usefixtures("unread")
def test_release_of_other_rows_is_new(mill: Mill) -> None:
    mill.answer(0, 1, 2)
    first = mill.publish(allow_incomplete=True)
    mill.answer(3)
    second = mill.publish()
    assert (second.new, second.rows["turns"], first.rows["turns"]) == (True, 4, 3)
    assert mill.pointer()["revision"] == second.revision
    assert len(mill.revisions()) == 2


@pytest.mark.usefixtures("unread")
def test_release_that_lost_a_file_is_made_again(mill: Mill) -> None:
    mill.answer(0, 1, 2, 3)
    mill.store.seal_all()
    first = mill.publish()
    next((mill.folder / first.revision).glob("data/turns/*")).unlink()
    assert mill.publish().new


def test_release_with_pending_rows_is_refused(mill: Mill) -> None:
    mill.answer(0)
    with pytest.raises(ReleaseRefused, match=r"3 rows are pending.*release\.allow_incomplete"):
        mill.publish()
    assert not mill.folder.exists()


@pytest.mark.usefixtures("unread")
def test_release_that_does_not_load_leaves_the_one_before(
    mill: Mill, monkeypatch: pytest.MonkeyPatch
) -> None:
    mill.answer(0, 1, 2)
    first = mill.publish(allow_incomplete=True)
    pointer = mill.pointer()
    mill.answer(3)
    monkeypatch.setattr(dataset, "read_back", broken)
    with pytest.raises(ReleaseError, match="does not load"):
        mill.publish()
    assert mill.pointer() == pointer
    assert mill.revisions() == [first.revision]


@pytest.mark.usefixtures("unread")
def test_release_without_rows_still_has_a_file_a_view(mill: Mill) -> None:
    mill.answer(0, 1, 2, 3, status="failed", output_ids=[])
    release = mill.publish()
    assert release.rows == {"conversations": 0, "turns": 0}
    for view in release.rows:
        (shard,) = (mill.folder / release.revision / "data" / view).iterdir()
        assert pq.read_metadata(shard).num_rows == 0


@pytest.mark.usefixtures("unread")
def test_release_holds_the_views_that_are_wanted(mill: Mill) -> None:
    mill.answer(0, 1, 2, 3)
    release = mill.publish(views=["turns"])
    assert release.rows == {"turns": 4}
    assert [p.name for p in (mill.folder / release.revision / "data").iterdir()] == ["turns"]


@pytest.mark.usefixtures("unread")
def test_release_is_cut_into_numbered_shards(mill: Mill, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("promptmill.release.shards._ROWS_A_BATCH", 1)
    mill.answer(0, 1, 2, 3, reasoning="because " * 80_000)  # 0.64 MB each
    folder = mill.folder / mill.publish(shard_mb=1).revision / "data" / "turns"
    shards = sorted(folder.iterdir())
    assert [p.name for p in shards] == ["A-00000-of-00002.parquet", "A-00001-of-00002.parquet"]
    tables = [pq.read_table(p, columns=["id"]) for p in shards]
    assert [table.column("id").to_pylist() for table in tables] == [["a", "b"], ["c", "d"]]


@pytest.mark.usefixtures("unread")
def test_release_leaves_no_staging_behind(mill: Mill) -> None:
    mill.answer(0, 1, 2, 3)
    release = mill.publish()
    assert {p.name for p in mill.folder.iterdir()} == {release.revision, "latest.json"}
