"""How many requests a server has in flight."""

from __future__ import annotations

import pytest

from promptmill.generation.window import RequestSizes, Window


def window(capacity: int | None = 376_000, limit: int | None = None) -> Window:
    return Window(capacity, limit, RequestSizes(), now=100.0)


def sizes_after(w: Window, *loads: tuple[int, int, int]) -> list[int]:
    """The window after each of these loads (running, queued, in flight), 5 s apart."""
    sizes = []
    for n, (running, queued, in_flight) in enumerate(loads, 1):
        w.sample(100.0 + 5 * n, running, queued, in_flight)
        sizes.append(w.size(100.0 + 5 * n))
    return sizes


def test_window_starts_at_32_and_grows_by_a_quarter_of_what_runs_while_it_is_full() -> None:
    w = window()
    assert w.size(100.0) == 32
    assert sizes_after(w, (32, 0, 32), (40, 0, 39), (50, 0, 50)) == [40, 50, 63]
    assert sizes_after(window(), (8, 0, 32)) == [32], "it does not shrink without a queue"


def test_window_that_is_not_used_up_stays() -> None:
    assert sizes_after(window(), (30, 0, 30)) == [32]


def test_window_keeps_a_short_queue() -> None:
    assert sizes_after(window(), (28, 4, 32), (20, 12, 32), (20, 4, 24)) == [32, 24, 24]


def test_window_falls_by_a_quarter_at_a_time() -> None:
    assert sizes_after(window(), (2, 30, 32), (2, 22, 24), (2, 16, 18), (0, 13, 13)) == [24, 18, 13, 9]


@pytest.mark.parametrize(("limit", "largest"), [(None, 1024), (48, 48), (2, 2)])
def test_window_stays_within_its_bounds(limit: int | None, largest: int) -> None:
    w = window(limit=limit)
    assert sizes_after(w, *[(4000, 0, 4000)] * 3)[-1] == largest
    assert sizes_after(w, *[(0, 9, 9)] * 30)[-1] == min(4, largest)


def test_window_without_a_sample_for_30_s_goes_by_capacity() -> None:
    w = window()
    w.sample(105.0, 32, 0, 32)
    assert w.size(134.9) == 40
    assert w.size(135.0) == 376_000 // 4_000
    w.sample(140.0, 90, 0, 94)
    assert w.size(140.0) == 113, "it goes on from there"


def test_window_without_a_sample_stays_within_its_limit_and_where_capacity_is_unknown() -> None:
    assert window(limit=48).size(500.0) == 48
    assert window(capacity=None).size(500.0) == 32
    assert window(capacity=4_000).size(500.0) == 4


def test_request_sizes_are_weighed_by_how_long_a_request_is_held() -> None:
    sizes = RequestSizes()
    assert sizes.kv_mean == 4_000
    for _ in range(3_000):
        sizes.finished(1_000, 2_000)
    assert sizes.kv_mean == pytest.approx(2_000, rel=0.1)
    for _ in range(2_000):
        sizes.finished(6_000, 2_000)
        sizes.finished(6_000, 0)
    assert sizes.kv_mean == pytest.approx(7_000, rel=0.1), "old ones are forgotten"
