from __future__ import annotations

from pathlib import Path

import pytest

from promptmill.files import written_whole


def test_file_appears_whole_when_the_block_ends(tmp_path: Path) -> None:
    path = tmp_path / "new" / "a.bin"
    with written_whole(path) as file:
        file.write(b"one")
        assert not path.exists()
    assert path.read_bytes() == b"one"
    assert path.stat().st_mode & 0o777 == 0o644
    assert list(path.parent.iterdir()) == [path]


def test_file_replaces_the_one_before(tmp_path: Path) -> None:
    path = tmp_path / "a.bin"
    path.write_bytes(b"a longer one before")
    with written_whole(path) as file:
        file.write(b"two")
    assert path.read_bytes() == b"two"


@pytest.mark.parametrize("failure", [ValueError, KeyboardInterrupt])
def test_file_leaves_nothing_where_the_block_fails(tmp_path: Path, failure: type[BaseException]) -> None:
    with pytest.raises(failure), written_whole(tmp_path / "a.bin") as file:
        file.write(b"half")
        raise failure
    assert list(tmp_path.iterdir()) == []


def test_file_before_stands_where_the_block_fails(tmp_path: Path) -> None:
    path = tmp_path / "a.bin"
    path.write_bytes(b"before")
    with pytest.raises(ValueError, match="stop"), written_whole(path) as file:
        file.write(b"half")
        raise ValueError("stop")
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == {"a.bin": b"before"}
