"""The run that promptmill is built for, on the simulator with the memory of eight 96 GB cards.

By hand it went: out of memory at a fraction of 0.93 (0.82 GB left), life at 0.88 (5.47 GB).
"""

from __future__ import annotations

import json
import re
import sqlite3
import sys
from pathlib import Path

import pytest
from place import ROOT, TEST_S, Place

from tests.contract.sglang_place import sim_model

pytestmark = pytest.mark.timeout(TEST_S)
PROFILE = """
model = "moonshotai/Kimi-K2.5"
model_path = "{model}"
[server]
engine = "sglang"
version = "0.5.23"
command = ["{python}", "-m", "promptmill.sim", "--sim-gpu", "kimi-96gb", "--sim-speed", "100",
           "--sim-mean-output", "150", "--sim-oom-running", "6"]
max_in_flight = 40
[server.flags]
tp-size = 8
mem-fraction-static = 0.93
context-length = 49152
[chat]
template = "{root}/deployments/demo/chat_template.jinja"
[classes.short]
max_new_tokens = 600
[store]
url = "data/store"
[release]
url = "data/release"
[[partitions]]
name = "B1_glaive"
source = "b1.jsonl"
[[partitions]]
name = "B4_deepseek"
source = "b4.jsonl"
"""
ROWS = 30


@pytest.fixture
def kimi(place: Place, shared_api: Place) -> Place:
    """`place` with kimi.toml. Four prompts fill half the chunk of a prefill, which may not fit then."""
    place.env["PREFECT_API_URL"] = shared_api.api_url
    model = sim_model(place.folder)
    text = PROFILE.format(model=model, python=sys.executable, root=ROOT)
    (place.folder / "kimi.toml").write_text(text, encoding="utf-8")
    for name in ("b1", "b4"):
        rows = [
            {"id": f"{name}-{n}", "prompt": f"{n}. " + "Say what this means. " * 450} for n in range(ROWS)
        ]
        (place.folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return place


def artifact(api: Place, key: str) -> str:
    """The latest artifact of that key, from Prefect's own database."""
    with sqlite3.connect(api.folder / "prefect/prefect.db") as database:
        (data,) = database.execute(
            "select data from artifact where key = ? order by created desc limit 1", (key,)
        ).fetchone()
    database.close()
    text = str(json.loads(data))
    return json.dumps(json.loads(text), ensure_ascii=False) if text.startswith("[") else text


def log_of(place: Place, life: int) -> str:
    (path,) = (place.folder / "data/store/servers").glob(f"promptmill-*-{life}-*.log")
    return Path(path).read_text(encoding="utf-8")


STEP = "mem-fraction-static 0.93 → 0.88"


def run(place: Place, headroom_gib: str) -> str:
    """What a run that ended well has printed."""
    ran = place.run("promptmill", "run", "kimi.toml", "--set", f"server.min_headroom_gib={headroom_gib}")
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout


def check_learned(place: Place, api: Place, told: str, cause: str) -> None:
    """It met `cause` at the fraction it was given, and went on with the right one."""
    assert re.search(cause, told)
    assert STEP in told
    assert told.count("launching server") == 2
    assert re.search(r"is ready .* 1(58|59|60),\d{3} KV tokens.* 5\.\d+ GiB of GPU memory free", told)
    status = json.loads(place.run("promptmill", "status", "kimi.toml", "--json").stdout)
    for part in status["partitions"].values():
        assert part["rows"] == ROWS
        assert part["pending"] == part["failed"] == part["rejected"] == 0
    report, lives = artifact(api, "report"), artifact(api, "server-lives")
    for text in (report, lives):
        assert STEP in text
    assert re.search(cause, lives)
    assert "--mem-fraction-static" not in report
    assert "mem_fraction_static': 0.88" in log_of(place, 2) or "0.88" in log_of(place, 2)


def test_kimi_run_finds_its_memory_fraction_by_itself_and_keeps_it(kimi: Place, shared_api: Place) -> None:
    check_learned(kimi, shared_api, run(kimi, "0"), "out of memory")
    with (kimi.folder / "b1.jsonl").open("a", encoding="utf-8") as file:
        file.write('{"id": "new", "prompt": "Say what this means."}\n')
    again = run(kimi, "0")  # nobody has to learn twice
    assert f"as in an earlier run: {STEP}" in again
    assert again.count("launching server") == 1
    assert f"{2 * ROWS} already done, 1 to go" in again


def test_kimi_run_refused_at_the_gate_finds_its_memory_fraction_by_itself(
    kimi: Place, shared_api: Place
) -> None:
    check_learned(kimi, shared_api, run(kimi, "2.0"), r"leaves 0\.[78]\d GiB")
