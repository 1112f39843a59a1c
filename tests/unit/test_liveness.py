"""Tokens that move are life; nothing else is. All in virtual time."""

from __future__ import annotations

from promptmill.serving.client import Load
from promptmill.serving.liveness import Limits, Liveness, Loss

LIMITS = Limits(inactivity_timeout_s=60.0, collapse_timeout_s=300.0)


def server(in_flight: int = 0, now: float = 0.0) -> Liveness:
    liveness = Liveness(LIMITS, now)
    for _ in range(in_flight):
        liveness.sent(now)
    return liveness


def lost_at(liveness: Liveness, start: int, end: int, each=lambda t: None) -> tuple[int, Loss] | None:
    """The second in which it counts as lost, polled each second."""
    for t in range(start, end):
        each(t)
        if loss := liveness.loss(float(t)):
            return t, loss
    return None


def test_idle_server_is_never_lost() -> None:
    assert lost_at(server(), 1, 36_000) is None


def test_silence_with_requests_in_flight_is_a_hang_after_the_inactivity_time() -> None:
    found = lost_at(server(3), 1, 200)
    assert found is not None
    assert found[0] == 60
    assert found[1].signature == "hang"
    assert "3 requests in flight" in found[1].text


def test_answers_with_200_and_no_progress_is_no_life() -> None:
    liveness = server(2)
    same = Load(running=2, queued=0, used_tokens=500)

    def polled(t: int) -> None:
        liveness.polled(same, t)

    found = lost_at(liveness, 1, 200, polled)
    assert found is not None and found[0] <= 61 + 1


def test_requests_that_the_server_does_not_know_of_are_named_as_lost() -> None:
    liveness = server(2)
    liveness.polled(Load(running=0, queued=0, used_tokens=0), 1.0)
    found = lost_at(liveness, 2, 200)
    assert found is not None
    assert found[1].signature == "lost_requests"


def test_sample_that_is_as_old_as_the_silence_says_nothing() -> None:
    """A scheduler that stands still: the last one that it made was empty."""
    liveness = server(2)
    stale = Load(running=0, queued=0, used_tokens=0, as_of=0.5)
    found = lost_at(liveness, 1, 200, lambda t: liveness.polled(stale, t))
    assert found is not None
    assert found[1].signature == "hang"
    liveness = server(1)
    found = lost_at(liveness, 1, 200, lambda t: liveness.polled(Load(0, 0, 0, as_of=float(t)), t))
    assert found is not None
    assert found[1] == Loss(
        "lost_requests", "no token for 60 s with 1 request in flight, and it says that it has none"
    )


def refuse(liveness: Liveness, t: int) -> None:
    liveness.sent(t)
    liveness.ended()
    liveness.put_off(t)


def test_server_that_puts_everything_off_is_given_six_times_as_long() -> None:
    liveness = server()
    found = lost_at(liveness, 1, 1000, lambda t: refuse(liveness, t))
    assert found is not None
    assert found[0] == 361
    assert found[1] == Loss("hang", "it has put off every request for 360 s")


def test_server_that_puts_off_and_answers_lives_and_so_does_one_that_is_no_longer_asked() -> None:
    liveness = server()

    def each(t: int) -> None:
        refuse(liveness, t)
        if t % 300 == 0:
            liveness.tokens(1, t)

    assert lost_at(liveness, 1, 3600, each) is None
    liveness = server()
    refuse(liveness, 1)
    assert lost_at(liveness, 2, 3600) is None


def test_address_refuses_until_it_answers() -> None:
    liveness = server()
    assert not liveness.refusing
    liveness.refused(1.0)
    assert liveness.refusing
    liveness.polled(None, 2.0)
    assert not liveness.refusing


def test_stall_of_seventy_seconds_is_no_death_where_the_limit_is_longer() -> None:
    liveness = Liveness(Limits(600.0, 600.0), 0.0)
    liveness.sent(0.0)
    assert lost_at(liveness, 1, 71) is None
    liveness.tokens(1, 71.0)
    assert lost_at(liveness, 72, 600) is None


def test_an_hour_of_long_prefills_with_503s_is_no_death() -> None:
    """A chunk every 25 s moves the KV use, no stream has a token yet, and every other poll is refused."""
    liveness = server(8)
    used = 0

    def each(t: int) -> None:
        nonlocal used
        if t % 25 == 0:
            used += 8192
        if t % 2:
            liveness.polled(None, t)  # 503
        else:
            liveness.polled(Load(running=8, queued=100, used_tokens=used % 150_000), t)

    assert lost_at(liveness, 1, 3600, each) is None


def test_silence_counts_from_the_first_request_and_not_from_the_last_answer() -> None:
    liveness = server(1)
    liveness.tokens(5, 1.0)
    liveness.ended()
    liveness.sent(1000.0)
    assert liveness.loss(1001.0) is None
    assert liveness.loss(1059.0) is None
    assert liveness.loss(1060.0) is not None


def test_refused_connections_are_death_after_seconds_even_when_idle() -> None:
    liveness = server()
    found = lost_at(liveness, 1, 60, lambda t: liveness.refused(t) if t % 2 else None)
    assert found is not None
    assert found[0] <= 7
    assert found[1].signature == "refused"


def test_refused_connections_between_answers_are_no_death() -> None:
    liveness = server(1)

    def each(t: int) -> None:
        liveness.refused(t) if t % 4 else liveness.polled(None, t)
        liveness.tokens(1, t)

    assert lost_at(liveness, 1, 600, each) is None


def decode(rate_at, in_flight: int = 40, until: int = 3600, ends_at: int | None = None):
    liveness = server(in_flight)

    def each(t: int) -> None:
        if ends_at is not None and ends_at <= t < ends_at + in_flight - 2:
            liveness.ended()
        liveness.tokens(rate_at(t), t)

    return lost_at(liveness, 1, until, each)


def test_throughput_that_falls_and_stays_low_is_a_collapse() -> None:
    found = decode(lambda t: 600 if t < 600 else 25)
    assert found is not None
    assert found[1].signature == "collapse"
    assert 600 + 300 <= found[0] <= 600 + 300 + 90


def test_throughput_that_recovers_is_no_collapse() -> None:
    assert decode(lambda t: 25 if 600 <= t < 850 else 600) is None


def test_half_of_the_throughput_is_no_collapse() -> None:
    assert decode(lambda t: 1350 if t < 600 else 600) is None


def test_the_tail_of_a_run_is_no_collapse() -> None:
    assert decode(lambda t: 600 if t < 600 else 20, ends_at=600) is None
