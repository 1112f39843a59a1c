"""One release by SGLang, its scheduler killed in the middle: the real one where SGLANG_UNDER_TEST=real."""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from datasets import load_dataset
from place import GIVE_UP_S, ROOT, TEST_S, Place, wait_for

from promptmill.store.journal import JournalReader
from tests.contract.sglang_place import REAL, find_engine

pytestmark = pytest.mark.timeout(TEST_S)
REAL_PROMPTS = ROOT.parent / "shared" / "data"
ROWS = 3


def prompts(folder: Path) -> Iterator[tuple[str, str]]:
    """Partition and source: real prompts where they are at hand, else those of the demo."""
    for path in sorted(REAL_PROMPTS.glob("*.json*")) if REAL_PROMPTS.is_dir() else []:
        yield path.name.partition(".")[0], str(path)
    if not REAL_PROMPTS.is_dir():
        for name in ("math", "questions"):
            yield name, str(ROOT / "deployments" / "demo" / f"{name}.jsonl")


def tree(place: Place) -> list[psutil.Process]:
    """The server's processes. Their environment is no help: SGLang writes its titles over it."""
    (state,) = (place.folder / "store/servers").glob("promptmill-*.json")
    main = psutil.Process(json.loads(state.read_text(encoding="utf-8"))["server"][0])
    return [main, *main.children(recursive=True)]


def journaled(place: Place, partitions: list[str]) -> int:
    journal = place.folder / "store/journal.sqlite"
    return (
        sum(len(list(JournalReader(journal).answers(name))) for name in partitions) if journal.exists() else 0
    )


def test_release_survives_the_death_of_its_scheduler(place: Place) -> None:
    engine = find_engine(place.folder, real_text=True)
    if engine is None:
        pytest.skip("the real SGLang is not built: make test-sglang")
    slow = {} if REAL else {"sim-speed": 2, "sim-mean-output": 60}
    path = engine.write_profile(place.folder, **slow)
    text = path.read_text(encoding="utf-8")
    # SmolLM2's own template: it answers in a few words then, and comes to an end. It shows no tools.
    chat = 'reasoning = "none"\nignored_tools = "keep"'
    text = re.sub(r"^template = .*$", chat, text, flags=re.MULTILINE)
    text = text[: text.index("[[partitions]]")].replace("gpu_wait_s = 0", "gpu_wait_s = 0\nmax_in_flight = 4")
    text = text.replace("max_new_tokens = 64", "max_new_tokens = 96")
    names = []
    for name, source in prompts(place.folder):
        names.append(name)
        text += f'[[partitions]]\nname = "{name}"\nsource = "{source}"\n'
    path.write_text(text, encoding="utf-8")

    ran = place.start("promptmill", "run", "profile.toml", "--limit", str(ROWS), log="run.log")

    def output() -> str:
        return (place.folder / "run.log").read_text(encoding="utf-8")

    wait_for(lambda: journaled(place, names) >= 2 or ran.poll() is not None, "two answers")
    assert ran.poll() is None, output()
    first = tree(place)
    (victim,) = (process for process in first if process.name().startswith("sglang::sched"))
    victim.send_signal(signal.SIGKILL)
    assert ran.wait(GIVE_UP_S) == 0, output()
    assert place.wait_until_empty(0) == []
    assert not any(process.is_running() for process in first)

    told = output()
    assert told.count("SERVER DIED") == 1, told
    assert told.count("launching server") == 2, told
    assert "resuming: " in told
    pointer = json.loads((place.folder / "release/latest.json").read_text(encoding="utf-8"))
    counts = json.loads(place.run("promptmill", "status", "profile.toml", "--json").stdout)["partitions"]
    for name, part in counts.items():
        assert part["pending"] == part["failed"] == 0, (name, part)
        assert sum(part.values()) == 2 * part["rows"]
    assert Path(pointer["path"]).is_dir()
    assert sum(part["answered"] for part in counts.values()) > 0
    release = load_dataset(pointer["path"], "turns", split="train", cache_dir=str(place.folder / "hf"))
    assert len(set(release["prompt_hash"])) == len(release) > 0
    assert all(len(row["input_ids"]) == len(row["loss_mask"]) for row in release)
