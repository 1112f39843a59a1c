"""Serving a mill life after life, with steps and outcomes that are given."""

from __future__ import annotations

from typing import Any
from unittest.mock import Mock

import pytest

from promptmill import events
from promptmill.errors import LaunchFailed
from promptmill.generation.mill import Finished
from promptmill.lives import Steps, keep_served
from promptmill.serving.liveness import Loss
from promptmill.serving.remedies import Verdict
from promptmill.serving.server import Lost, Server

WAIT_S = 30.0


def lost(name: str, last: bool = True) -> Lost:
    return Lost(Server(name, "http://127.0.0.1:1", ""), Loss("", "gone"), 0, last=last)


def make_mill(*outcomes: Any) -> Mock:
    """Its `wait` gives these in turn; it is served as long as nobody says otherwise."""
    mill = Mock(**{"wait.side_effect": outcomes, "needs_server.return_value": True})
    mill.done.return_value = mill.pending.return_value = 0
    return mill


def make_steps(**changes: Any) -> Steps:
    given = {
        "launch": lambda _: [],
        "gate": Mock(),
        "diagnose": lambda *_: Verdict("wait", "", wait_s=WAIT_S),
    }
    return Steps(**{**given, **changes})


def test_loss_of_a_second_server_does_not_end_the_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0

    def wait(timeout_s: float) -> Lost | Finished | None:
        nonlocal now
        now += timeout_s
        return next(outcomes, None) or (None if now <= WAIT_S else Finished())

    outcomes = iter([lost("a"), lost("b")])
    monkeypatch.setattr("promptmill.lives.time", Mock(monotonic=lambda: now))

    def launch(_: object) -> list[Server]:
        began.append(now)
        return []

    began: list[float] = []
    mill, servers = make_mill(), Mock(**{"may_return.return_value": False})
    mill.wait.side_effect = wait
    mill.is_served.return_value = False
    list(keep_served(servers, mill, 1, make_steps(launch=launch)))
    servers.let_go.assert_called_once()
    assert began == [0.0, 1.0 + WAIT_S]  # the first was lost after a second


def test_return_of_a_server_that_fails_is_told() -> None:
    launch = Mock(side_effect=[[], LaunchFailed("server b is not usable: away", server="b")])
    mill, servers, told = make_mill(None, Finished()), Mock(), []
    with events.listening(told.append):
        assert list(keep_served(servers, mill, 1, make_steps(launch=launch))) == [True, True]
    assert "server b is not usable: away" in [str(event) for event in told]
    mill.fail.assert_not_called()


def test_verdict_to_stop_fails_the_mill() -> None:
    mill, servers = make_mill(), Mock()
    mill.is_served.return_value = False
    failed = LaunchFailed("no such command")
    steps = make_steps(launch=Mock(side_effect=failed), diagnose=Mock(return_value=Verdict("stop", "why")))
    assert list(keep_served(servers, mill, 1, steps)) == [True]
    mill.fail.assert_called_once_with(servers.gave_up.return_value)
