"""What a server's log tells, line by line and as a whole."""

from __future__ import annotations

import json
import tracemalloc
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from promptmill.serving.log_lines import SHAPES
from promptmill.serving.logs import LogDigest, LogFacts, parse_line, read_log

DATA = Path(__file__).parent / "data"
SHARED = Path(__file__).parents[2] / ".." / "shared"
LINES = [json.loads(line) for line in (DATA / "sglang_log_lines.jsonl").read_text("utf-8").splitlines()]
"""Lines of public logs, with what they say."""

TINY = LogFacts(
    kv_tokens=4096,
    kv_dtype="bfloat16",
    context_tokens=2048,
    max_running_requests=2048,
    chunked_prefill_size=4096,
    weights_gib=0.0,
    model_class="LlamaForCausalLM",
    ready=True,
)
SMOL = replace(TINY, kv_tokens=1500, max_running_requests=750, weights_gib=0.23)
# Facts, decode and prefill lines of the whole log, retractions, failed health checks, phase, signatures.
LOGS = {
    "bad_model_path": (LogFacts(), 0, 0, 0, 0, "arguments", {"bad_model", "exception"}),
    "not_enough_mem": (
        LogFacts(weights_gib=0.0, model_class="LlamaForCausalLM"),
        0, 0, 0, 0, "kv", {"kv_budget", "exception", "child_died"},
    ),
    "oov_crash": (TINY, 1, 16, 0, 0, "serving", {"exception", "child_died"}),
    "port_in_use": (replace(TINY, kv_tokens=8192), 0, 0, 0, 0, "serving", {"address_in_use", "port_wait"}),
    "sched_sigkill": (TINY, 9, 7, 0, 0, "serving", {"child_killed", "child_died"}),
    "sigterm": (SMOL, 27, 15, 2, 2, "serving", {"sigterm"}),
    "smollm2_kv_saturation": (SMOL, 22, 10, 2, 0, "serving", set()),
}  # fmt: skip


def digest_of(*lines: str) -> LogDigest:
    digest = LogDigest()
    digest.feed("".join(f"{line}\n" for line in lines).encode())
    return digest


@pytest.mark.parametrize("known", LINES, ids=lambda known: known["kind"])
def test_parse_line_of_a_public_log(known: dict[str, object]) -> None:
    event = parse_line(known["line"])
    assert event is not None
    assert (event.kind, event.rank, event.values) == (known["kind"], known["rank"], known["values"])


def test_every_collected_line_is_known_here() -> None:
    path = SHARED / "sglang_log_lines.txt"
    if not path.exists():
        pytest.skip("the collection is not beside the repository")
    assert set(path.read_text("utf-8").splitlines()) == {known["line"] for known in LINES}


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.kind)
def test_parse_line_reads_the_example_of_each_shape(shape) -> None:
    for prefix in ("", "[2026-02-20 01:00:00] ", "[2026-02-20 01:00:00.123 DP0 PP0 TP3 EP3] "):
        event = parse_line(prefix + shape.example)
        assert event is not None
        assert event.kind == shape.kind
        assert event.rank == ("DP0 PP0 TP3 EP3" if "DP0" in prefix else "")


@pytest.mark.parametrize(
    "line",
    [
        "",
        "an unknown line",
        "[2026-02-20 01:00:00",
        '[2031-02-03 04:05:10] INFO:     127.0.0.1:50001 - "GET /health HTTP/1.1" 200 OK',
        "[2031-02-03 04:05:10] Receive: obj=GenerateReqInput(text='Decode batch, CUDA out of memory')",
        "Of the allocated memory 84.00 GiB is allocated by PyTorch, and 1 GiB is reserved",
    ],
)
def test_parse_line_knows_what_tells_nothing(line: str) -> None:
    assert parse_line(line) is None


def test_parse_line_takes_colours_bars_and_torn_lines() -> None:
    event = parse_line(
        "Loading:  50%|##  | 1/2\r\x1b[1;33m[2026-02-20 01:00:00 TP0]\x1b[0m Load weight begin. avail"
    )
    assert event is not None
    assert (event.kind, event.rank, event.values) == ("weights_begin", "TP0", {})
    glued = parse_line(
        "Loading: 0/1 [00:00<?, ?it/s][2026-02-20 01:00:00 TP0] Memory pool end. avail mem=8.38 GB"
    )
    assert glued is not None
    assert glued.values == {"available_gib": 8.38}
    torn = parse_line("[2026-02-20 01:00:00] Decode batch. #running-req: 7, #token: " + "9" * 5000)
    assert torn is not None
    assert torn.values["running"] == 7


@settings(max_examples=15, deadline=None)
@given(st.text(max_size=300), st.sampled_from([shape.needle for shape in SHAPES]))
def test_parse_line_never_raises(text: str, needle: str) -> None:
    parse_line(text)
    parse_line(text[:150] + needle + text[150:])


@pytest.mark.parametrize("style", ["server_args=ServerArgs({}='{}'", "server_args={{'{}': '{}'"])
def test_arguments_are_read_by_name_and_nothing_secret_is_kept(style: str) -> None:
    rest = ", 'chunked_prefill_size': 8192, mem_fraction_static=0.93, 'kv_cache_dtype': 'fp8_e4m3'"
    line = (
        "[2026-02-20 01:00:00] "
        + style.format("api_key", "hush-hush")
        + rest
        + ", launch_command='--api-key hush'"
    )
    digest = digest_of(line, "Authorization: Bearer hush-hush", "CUDA out of memory with api-key=hush-hush")
    assert digest.facts.mem_fraction_static == 0.93
    assert digest.facts.chunked_prefill_size == 8192
    assert digest.facts.kv_dtype == "fp8_e4m3"
    kept = repr([digest.tail, digest.matches, digest.facts, parse_line(line)])
    assert "hush" not in kept
    assert "server_args=…" in digest.tail[0]


@pytest.mark.parametrize("name", LOGS)
@pytest.mark.parametrize("whole", [False, True], ids=["excerpt", "transcript"])
def test_a_real_log(name: str, whole: bool) -> None:
    path = SHARED / "sglang_transcripts" / f"server_log_{name}.txt" if whole else DATA / f"log_{name}.txt"
    if not path.exists():
        pytest.skip("the whole transcripts are not beside the repository")
    facts, decoded, prefilled, retractions, unhealthy, phase, signatures = LOGS[name]
    digest = read_log(path)
    for field in LogFacts.__slots__:
        expected = getattr(facts, field)
        if expected is not None:
            assert getattr(digest.facts, field) == pytest.approx(expected, abs=0.02), field
    assert digest.facts.headroom_gib is None, "this was a CPU"
    assert (digest.retractions, digest.health_failures, digest.phase) == (retractions, unhealthy, phase)
    assert set(digest.matches) == signatures
    if whole:
        assert (digest.decode_lines, digest.prefill_lines) == (decoded, prefilled)
    assert bool(digest.last_decode) == bool(decoded)


def test_headroom_is_the_least_over_ranks_of_the_last_told() -> None:
    end = (
        "[2026-10-20 01:00:00 {}] Capture {} CUDA graph end. elapsed=4 s, mem usage=2.10 GB, avail mem={} GB."
    )
    digest = digest_of(
        "[2026-10-20 01:00:00 TP0] Memory pool end. avail mem=0.10 GB",
        end.format("TP0", "target decode", 5.0),
        end.format("TP1", "target decode", 4.5),
        end.format("TP1", "draft decode", 3.9),
        "[2026-10-20 01:00:01 TP0] max_total_num_tokens=159000, available_gpu_mem=5.47 GB",
    )
    assert digest.facts.headroom_gib == 3.9
    assert digest.facts.kv_tokens == 159000
    assert digest.phase == "warmup"


def test_facts_of_the_target_are_not_those_of_its_drafter() -> None:
    digest = digest_of(
        "Load weight end. elapsed=9 s, type=KimiK25, avail mem=20 GB, mem usage=73.20 GB.",
        "KV Cache is allocated. dtype: torch.bfloat16, #tokens: 159000, KV size: 10.00 GB",
        "Load weight begin. avail mem=9 GB",
        "Load weight end. elapsed=1 s, type=LlamaEagle3, avail mem=8 GB, mem usage=1.50 GB.",
        "KV Cache is allocated. dtype: torch.float16, #tokens: 1000, KV size: 1.00 GB",
        "Using FP8 KV cache but no scaling factors provided. Defaulting to scaling factors of 1.0.",
    )
    facts = digest.facts
    assert (facts.model_class, facts.weights_gib, facts.kv_dtype) == ("KimiK25", 73.2, "bfloat16")
    assert facts.fp8_without_scales
    assert digest.phase == "kv", "phases do not go back"


@pytest.mark.parametrize("size", [1, 2, 7, 4096])
def test_feed_takes_any_cut(size: int) -> None:
    data = (DATA / "log_sigterm.txt").read_bytes() + "KV cache … Retract requests. ☃\r\nSIGTERM rec".encode()
    whole, cut = LogDigest(), LogDigest()
    whole.feed(data)
    for start in range(0, len(data), size):
        cut.feed(data[start : start + size])
    whole.finish()
    cut.finish()
    assert list(whole.tail) == list(cut.tail)
    assert "☃" in whole.tail[-2]
    assert (whole.facts, whole.matches, whole.retractions) == (cut.facts, cut.matches, cut.retractions)
    assert whole.retractions == 3
    assert cut.lines == whole.lines


def test_a_very_long_line_is_cut_and_the_next_is_read() -> None:
    digest = LogDigest()
    for _ in range(300):
        digest.feed(b"x" * 1000)
    digest.feed(
        b" CUDA out of memory\nThe server is fired up\n"
        + b"y" * 70_000
        + b" SIGQUIT received\nCUDA out of memory"
    )
    assert digest.facts.ready
    assert not digest.matches
    assert max(map(len, digest.tail)) <= 2000
    digest.finish()
    assert set(digest.matches) == {"gpu_oom"}


def test_tail_is_bounded_and_holds_one_line_of_a_bar() -> None:
    digest = digest_of(*(f"line {n}" for n in range(1000)))
    assert digest.tail[-1] == "line 999"
    assert len(digest.tail) <= 40
    digest.feed(b"".join(b"Loading: %d/900 [00:01<00:09, 3.50it/s]\r" % n for n in range(900)))
    digest.feed(b"\n")
    assert digest.tail[-2] == "line 999"
    assert digest.tail[-1].startswith("Loading: 899")


def test_a_handlers_exception_while_serving_is_no_signature() -> None:
    lines = [
        "The server is fired up and ready to roll!",
        "Traceback (most recent call last):",
        "OSError: gone",
    ]
    assert not digest_of(*lines).matches
    fatal = digest_of(
        *lines, "Scheduler hit an exception: Traceback (most recent call last):", "IndexError: 7"
    )
    assert fatal.matches["exception"].first.line == "IndexError: 7"


def test_matches_hold_the_first_and_the_last_line_with_their_phase() -> None:
    oom = "[2026-10-20 01:00:00 TP{}] CUDA out of memory ({})"
    digest = digest_of("Load weight begin.", *(oom.format(n, n) for n in range(9)), "The server is fired up")
    digest.feed(oom.format(9, "last").encode() + b"\n")
    match = digest.matches["gpu_oom"]
    assert (match.first.line, match.first.log_phase) == ("[TP0] CUDA out of memory (0)", "loading")
    assert (match.last.line, match.last.log_phase) == ("[TP9] CUDA out of memory (last)", "serving")


def test_memory_stays_bounded_over_a_long_log() -> None:
    serving = (DATA / "log_sigterm.txt").read_bytes()
    block = serving * (500_000 // len(serving)) + b"one long line " * 20_000
    digest = LogDigest()
    digest.feed(block)
    tracemalloc.start()
    for _ in range(12):
        digest.feed(block)
    grown, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert digest.lines > 50_000
    assert grown < 1_000_000
    assert peak < 20_000_000


def test_read_log_of_a_missing_file_tells_nothing(tmp_path: Path) -> None:
    digest = read_log(tmp_path / "none.log")
    assert (digest.facts, digest.lines, list(digest.tail)) == (LogFacts(), 0, [])
    assert read_log(tmp_path).lines == 0
