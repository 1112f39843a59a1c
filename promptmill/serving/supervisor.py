"""The servers of one run, life after life: launched, gated, diagnosed, relaunched with what helps, ended."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Any

from promptmill import events
from promptmill.chat import ChatRenderer
from promptmill.errors import LaunchFailed, ServerError
from promptmill.model import Model
from promptmill.serving import gate, server
from promptmill.serving.command import server_flags, sglang_version
from promptmill.serving.facts import Facts
from promptmill.serving.gpus import hardware, wait_until_free
from promptmill.serving.logs import LogFacts, read_log
from promptmill.serving.remedies import Death, Phase, Verdict, decide
from promptmill.serving.server import Lost, Server
from promptmill.serving.signatures import Evidence, cause_of_death, classify
from promptmill.serving.start import last_words
from promptmill.serving.worked import Remedy, WorkedRemedies
from promptmill.settings import Profile, mask_command

_RESTART_S = 120.0
_EXIT_S = 2.0
_LOOK_AGAIN_S = 30.0
_ENV = "env:"
_UNTOLD = ("unknown", "killed", "crashed", "child_died", "child_crashed", "child_killed")
_REMEDIES = "remedies.json"


@dataclass(slots=True)
class Life:
    """One life of a server, for the table that people look at."""

    server: str
    started_at: str
    changed: str = ""
    """Flags that differ from the profile's."""
    facts: dict[str, Any] = field(default_factory=dict)
    answers: int = 0
    cause_of_death: str = ""
    remedy: str = ""

    def to_row(self) -> dict[str, Any]:
        told = ("version", "kv_tokens", "kv_dtype", "headroom_gib", "context_tokens", "slots", "startup_s")
        return {
            "server": self.server,
            "started": self.started_at,
            "changed flags": self.changed,
            **{name: self.facts.get(name) for name in told},
            "answers": self.answers,
            "cause of death": self.cause_of_death,
            "remedy": self.remedy,
        }


class Supervisor:
    """Used by the thread that owns the run. `folder` is for logs and state files; remedies lie beside it."""

    def __init__(self, profile: Profile, model: Model, renderer: ChatRenderer, folder: Path) -> None:
        self.lives: list[Life] = []
        self.deaths: list[Death] = []
        self._profile = profile
        self._model = model
        self._renderer = renderer
        self._folder = folder
        self._profile_flags = server_flags(profile)
        self._flags = dict(self._profile_flags)
        self._env = dict(profile.server.env)
        self._steps: dict[str, Remedy] = {}
        self._servers: list[Server] = []
        self._known: dict[str, Server] = {}
        """Every server of this run, the ended ones too."""
        self._look_again_at = 0.0
        self._to_restart: set[str] = set()
        """Addresses of servers that were lost while others went on, and not restarted since."""

    def launch(self) -> list[Server]:
        """Start the next life, or take those servers of somebody else that are not attached.

        Raises LaunchFailed where none could be, and ConfigError for a port that is taken.
        """
        started, failed = [], None
        missing = self._missing() if self._profile.server.urls else [""]
        # One that is away must not keep those waiting that are there; may_return() sees it come back.
        for url in self._ready(missing) or missing:
            try:
                one = self._take(url) if url else self._launch()
            except LaunchFailed as error:
                failed = error
                self._begin(error.server or "(not started)", datetime.now(UTC)).cause_of_death = _cause(error)
                continue
            self._servers.append(one)
            self._known[one.name] = one
            self._begin(one.name, one.started_at)
            shown = " ".join(mask_command(one.process.command)) if one.process else one.url
            events.tell(events.Launching(one.name, shown, ours=one.process is not None))
            started.append(one)
        if failed is not None and not started:
            raise failed
        return started

    def pass_gate(self, one: Server, longest_request_tokens: int) -> Facts:
        """Wait until the server is healthy. Raises LaunchFailed; the server is ended then."""
        try:
            facts = gate.pass_gate(self._profile, one, self._model, self._renderer, longest_request_tokens)
        except LaunchFailed as error:
            self._life(one.name).cause_of_death = _cause(error)
            if one.process is not None:
                one.process.wait(_EXIT_S if not one.alive else 0)
                one.exit_status = one.process.exit_status
            self._end(one, self._profile.server.stop_grace_s)
            raise
        self._life(one.name).facts = facts.to_json()
        events.tell(events.Ready(one.name, facts.to_json()))
        return facts

    def diagnose(self, ended: Lost | LaunchFailed) -> Verdict:
        """What to do about a server that died, or one that never became healthy. It is ended for good."""
        death = self._death_of(ended) if isinstance(ended, Lost) else self._failed_start(ended)
        self.deaths.append(death)
        verdict = decide(self.deaths, self._profile.server.max_relaunches, sglang_version(self._profile))
        if death.answers and verdict.action in ("relaunch", "wait", "quarantine"):
            self._keep_worked()  # it did not die of its flags
        if verdict.relaunch:
            self._apply(verdict)
        if self.lives:
            life = self._life(death.server)
            life.answers, life.cause_of_death = death.answers, death.cause
            life.remedy = f"{'relaunched' if verdict.relaunch else 'gave up'}: {verdict.why}"
        if verdict.relaunch:
            limit = self._profile.server.max_relaunches
            events.tell(events.Relaunching(len(self.deaths), limit, verdict.why))
        else:
            events.tell(events.GaveUp(death.server, verdict.why))
        return verdict

    def gave_up(self, verdict: Verdict, last: Lost | LaunchFailed) -> ServerError:
        """The error that ends a run whose server cannot be kept alive."""
        if isinstance(last, LaunchFailed):
            words = str(last)
        else:
            words = "\n".join([f"{self.deaths[-1].cause}.", *last_words(last.server)])
        advice = f"\n{verdict.advice}" if verdict.advice else ""
        return LaunchFailed(
            f"gave up on the server: {verdict.why}.{advice}\nThe last life: {words}\n"
            "What was answered is kept; the next run goes on from there.",
            permanent=True,
        )

    def let_go(self, lost: Lost) -> None:
        """One of several is lost, and the others go on; it is taken again when it is back."""
        life = self._life(lost.server.name)
        life.answers, life.cause_of_death = lost.answers, lost.loss.text
        life.remedy = "the others go on without it"
        self._end(lost.server, 0.0)
        if self._profile.server.restart_command:
            self._to_restart.add(lost.server.name)

    def may_return(self) -> bool:
        """Whether one of several servers that is away should be tried again now; looks every 30 s."""
        if not self._servers or time.monotonic() < self._look_again_at:
            return False
        missing = self._missing()
        self._look_again_at = time.monotonic() + _LOOK_AGAIN_S
        return bool(self._ready(missing))

    def _ready(self, missing: list[str]) -> list[str]:
        """Those that answer as a healthy server does, and those that are still to be restarted."""
        healthy = "/health" if self._profile.server.engine == "sglang" else "/v1/models"
        return [url for url in missing if url and (url in self._to_restart or server.answers(url, healthy))]

    def _missing(self) -> list[str]:
        """Addresses of other people's servers that are not attached."""
        attached = {one.name for one in self._servers}
        return [url for url in self._profile.server.urls if url not in attached]

    def note_answers(self, answers: Mapping[str, int]) -> None:
        """What the servers that are still alive have answered."""
        for name, n in answers.items():
            self._life(name).answers = n
        if any(answers.values()):
            self._keep_worked()

    def stop_all(self) -> None:
        for one in list(self._servers):
            self._end(one, self._profile.server.stop_grace_s)

    # --- starting

    def _launch(self) -> Server:
        if self._profile.server.engine == "sglang":
            if not self.lives:
                self._recall()
            if self._profile.server.gpu_wait_s:
                wait_until_free(self._profile.server.gpu_wait_s, {**os.environ, **self._env})
        return server.launch(
            self._profile, self._model, self._folder, len(self.lives) + 1, self._flags, self._env
        )

    def _take(self, url: str) -> Server:
        restart = [part.replace("{url}", url) for part in self._profile.server.restart_command]
        self._to_restart.discard(url)
        if restart and any(life.server == url for life in self.lives):
            events.tell(events.Notice(f"restarting {url}: {restart[0]}"))
            try:
                done = subprocess.run(
                    restart, capture_output=True, text=True, timeout=_RESTART_S, check=False
                )
            except (OSError, subprocess.TimeoutExpired) as error:
                raise _restart_failed(url, str(error)) from None
            if done.returncode:
                words = (done.stderr or done.stdout).strip()[-500:]
                raise _restart_failed(url, f"status {done.returncode}: {words}")
        return server.foreign(self._profile, url)

    # --- ending

    def _death_of(self, lost: Lost) -> Death:
        one = lost.server
        if one.process is not None and not lost.loss.signature:
            one.process.wait(_EXIT_S)
        status = one.process.exit_status if one.process else None
        evidence, facts = self._evidence(one, status, "serving")  # before our own SIGTERM stands in its log
        self._end(one, 0.0)  # whatever is left of it answers to nobody any more
        cause = lost.loss.text
        watched = lost.loss.signature
        # A scheduler that is gone has mostly said why, a moment before its server would have ended itself.
        if watched and (watched != "zombie" or evidence is None or evidence.signature in _UNTOLD):
            evidence = Evidence(watched, cause, {}, "serving")
        elif evidence is not None:
            cause = cause_of_death(evidence, status)
        return Death(
            server=one.name,
            phase="serving",
            cause=cause,
            exit_status=status,
            evidence=evidence,
            answers=lost.answers,
            flags=one.flags,
            env=dict(self._env),
            facts=facts,
            in_flight=lost.in_flight,
            quarantined=lost.quarantined,
        )

    def _failed_start(self, failed: LaunchFailed) -> Death:
        name = failed.server
        one = self._known.get(name)
        status = one.exit_status if one else None
        evidence, facts = self._evidence(one, status, "start") if one else (None, None)
        cause = _cause(failed)
        if evidence is not None and evidence.signature == "sigterm" and status is None:
            evidence = None  # it is we who ended it, when the gate had refused it
        if failed.signature:
            evidence = Evidence(failed.signature, cause, dict(failed.numbers), "serving")
        elif evidence is not None and evidence.signature:
            cause = cause_of_death(evidence, status)
        return Death(
            server=name,
            phase="start",
            cause=cause,
            exit_status=status,
            evidence=evidence,
            answers=0,
            flags=one.flags if one else dict(self._flags),
            env=dict(self._env),
            facts=facts,
            permanent=failed.permanent,
        )

    def _evidence(
        self, one: Server, status: int | None, phase: Phase
    ) -> tuple[Evidence | None, LogFacts | None]:
        """What its log says of its end, where it is ours to read and in SGLang's words."""
        if one.process is None or self._profile.server.engine != "sglang":
            return None, None
        digest = read_log(one.process.log)
        return classify(digest, status, phase), digest.facts

    def _end(self, one: Server, grace_s: float) -> None:
        one.stop(grace_s)
        if one in self._servers:
            self._servers.remove(one)

    def _begin(self, name: str, at: datetime) -> Life:
        changed = ", ".join(f"{r.flag} = {r.value}" for r in self._steps.values())
        self.lives.append(Life(name, f"{at:%Y-%m-%d %H:%M:%S} UTC", changed))
        return self.lives[-1]

    def _life(self, name: str) -> Life:
        """The latest of that name: somebody else's server has its address as the name of each life."""
        return next((life for life in reversed(self.lives) if life.server == name), self.lives[-1])

    # --- remedies

    def _apply(self, verdict: Verdict) -> None:
        """The next life is launched with the changed flags."""
        for step in verdict.steps:
            self._set(Remedy(step.flag, self._profile_flags.get(step.flag), step.after, verdict.why))

    def _set(self, remedy: Remedy) -> None:
        self._steps[remedy.flag] = remedy
        if remedy.flag.startswith(_ENV):
            self._env[remedy.flag.removeprefix(_ENV)] = str(remedy.value)
        elif remedy.value is None:
            self._flags.pop(remedy.flag, None)
        else:
            self._flags[remedy.flag] = remedy.value

    def _recall(self) -> None:
        """Begin with what worked before on this model, these GPUs and this version."""
        for remedy in remembered(self._profile, self._model, self._folder):
            self._set(remedy)
            events.tell(events.Notice(f"as in an earlier run: {remedy}"))

    def _keep_worked(self) -> None:
        if self._steps and not self._profile.server.urls:
            worked = WorkedRemedies(self._folder.parent / _REMEDIES)
            worked.keep(self._remembered_for, list(self._steps.values()))

    @cached_property
    def _remembered_for(self) -> str:
        """Asked once a run: nvidia-smi may take seconds, and a relaunch is not to wait for it."""
        return _remembered_for(self._profile, self._model)


def _cause(failed: LaunchFailed) -> str:
    """Its first line, without the name that stands beside it."""
    words = str(failed).partition("\n")[0]
    return words.removeprefix(f"server {failed.server} is not usable: ").removesuffix(".")


def _restart_failed(url: str, why: str) -> LaunchFailed:
    words = f"server {url} is not usable: server.restart_command failed: {why}"
    return LaunchFailed(words, server=url, signature="restart_failed")


def remembered(profile: Profile, model: Model, folder: Path) -> list[Remedy]:
    """What worked in an earlier run, and the next one begins with."""
    worked = WorkedRemedies(folder.parent / _REMEDIES)
    return worked.find(_remembered_for(profile, model), server_flags(profile))


def _remembered_for(profile: Profile, model: Model) -> str:
    version = sglang_version(profile)
    told = ".".join(map(str, version)) if version else "of unknown version"
    gpus = hardware({**os.environ, **profile.server.env})
    return f"{model.name} {model.revision[:16]} | {gpus} | sglang {told}"
