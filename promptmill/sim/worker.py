"""The scheduler process: the engine in scaled time, between two messages of the HTTP process."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from promptmill.sim import acting
from promptmill.sim.faults import SCHEDULER, Fault, Triggers
from promptmill.sim.figures import Figures
from promptmill.sim.link import Link
from promptmill.sim.logs import Log
from promptmill.sim.model import Sampling, Stream, start
from promptmill.sim.request import Finish, Request, Step
from promptmill.sim.scheduler import Engine
from promptmill.sim.startup import Loaded
from promptmill.sim.text import ModelFiles

_PUBLISH_S = 0.1
"""How often an idle scheduler renews its load snapshot."""
_UNSTREAMED_INTERVAL = 50
"""Tokens between two signs of life of a request that is not streamed."""
_COLLAPSE = 20.0
WARM_UP = "WARM_UP"
PROBE = "HEALTH_CHECK"


@dataclass(slots=True)
class _Job:
    """A request as this process sees it."""

    request: Request
    stream: Stream
    interval: int
    streamed: bool
    received: float
    poison: str | None = None
    sent: int = 0
    admitted: float = 0.0
    prefilled: float = 0.0


class Worker:
    """`run` returns never: it ends with its parent, by a fault or by a crash."""

    def __init__(
        self, link: Link, args: dict[str, Any], sim: Any, files: ModelFiles, loaded: Loaded,
        faults: Sequence[Fault], log: Log,
    ) -> None:  # fmt: skip
        self.link, self.args, self.sim, self.files, self.loaded, self.log = (
            link,
            args,
            sim,
            files,
            loaded,
            log,
        )
        self.engine = Engine(loaded.config)
        self._jobs: dict[str, _Job] = {}
        self._triggers = Triggers(faults, SCHEDULER)
        self._random = random.Random(args["random_seed"])
        self._origin = self._due = time.monotonic()
        self._slow, self._collapsing = 1.0, False
        self._leaking = False
        self._answers = 0
        self._probed = False
        graphs = loaded.plan.graph_gib > 0
        self._figures = Figures(self.engine, log, args["decode_log_interval"], graphs)
        self._published = 0.0
        self._now_s = 0.0

    def run(self) -> NoReturn:
        plan, config = self.loaded.plan, self.loaded.config
        self.link.send({
            "t": "ready", "kv_tokens": config.kv_tokens, "context": config.context_tokens,
            "max_running": config.max_running, "max_input": config.max_input_tokens,
            "weights_gib": plan.memory.weights, "kv_gib": plan.kv_gib, "graph_gib": plan.graph_gib,
            "headroom_gib": plan.headroom_gib, "vocab": self.loaded.vocabulary.size,
        })  # fmt: skip
        while True:
            was_busy = self.engine.busy
            self._handle(self.link.receive(0 if was_busy else _PUBLISH_S))
            if not was_busy:
                self._due = time.monotonic()
            if self.engine.busy:
                step = self.engine.step()
                self._wait(step)
                self._check(step)
                self._figures.note(step, self._now_s)
                self._report(step)
            else:
                self.engine.step()
                self._publish()
            self._act(self._triggers.due(self._answers, len(self.engine.running), self._elapsed_s()))
            if self._leaking and not self.engine.busy:
                acting.act(Fault("leak"), self.log, self.sim.sim_speed, 0, self._memory_facts())

    def _elapsed_s(self) -> float:
        return (time.monotonic() - self._origin) * float(self.sim.sim_speed)

    # -- messages --

    def _handle(self, messages: list[dict[str, Any]]) -> None:
        for message in messages:
            kind = message["t"]
            if kind == "generate":
                self._add(message)
            elif kind == "abort":
                ended = self.engine.abort("" if message["all"] else message["rid"])
                self._send_outputs([self._jobs[request.rid] for request in ended])
            elif kind == "health":
                self._probe(message["rid"])
            elif kind == "flush":
                self.link.send({"t": "reply", "id": message["id"], "ok": self._flush()})
            elif kind == "state":
                self.link.send(
                    {"t": "reply", "id": message["id"], "gen_throughput": self._figures.gen_throughput}
                )

    def _add(self, message: dict[str, Any]) -> None:
        ids: list[int] = message["ids"]
        config, given = self.loaded.config, message["sampling"]
        if len(ids) > config.max_input_tokens and self.args["allow_auto_truncate"]:
            ids = ids[: config.max_input_tokens]
        sampling = Sampling(
            max_new_tokens=given["max_new_tokens"], min_new_tokens=given["min_new_tokens"],
            temperature=given["temperature"], ignore_eos=given["ignore_eos"],
            stop_token_ids=frozenset(given["stop_token_ids"]), stop=tuple(given["stop"]),
            stop_regex=tuple(given["stop_regex"]), seed=self._seed(given["sampling_seed"]),
        )  # fmt: skip
        crashes_it = not ids or min(ids) < 0 or max(ids) >= self.loaded.vocabulary.size or message["crash"]
        poisons = [fault.name for fault in self._triggers.poisoned(ids)]
        if crashes_it:
            poisons, ids = ["oov"], [0]
        decode = self.files.decode
        stream = start(
            self.loaded.vocabulary,
            ids,
            sampling,
            decode,
            self.sim.sim_mean_output,
            self.sim.sim_mean_reasoning,
        )
        request = Request.from_ids(message["rid"], ids, sampling.max_new_tokens, stream)
        interval, streamed = message["interval"], message["stream"]
        job = _Job(request, stream, interval, streamed, time.time(), poisons[0] if poisons else None)
        self._jobs[request.rid] = job
        if len(ids) > config.max_input_tokens:
            text = (
                f"Input length ({len(ids)} tokens) exceeds the maximum allowed length "
                f"({config.max_input_tokens} tokens). Use a shorter input or enable --allow-auto-truncate."
            )
            request.finish = Finish("abort", message=text, status_code=400, err_type="BadRequestError")
        elif not self.engine.add(request):
            request.finish = Finish("abort", message="The request queue is full.", status_code=503)
        if request.finish:
            self._send_outputs([job])

    def _seed(self, given: int | None) -> int:
        if self.args["enable_deterministic_inference"]:
            return 42 if given is None else given
        return self._random.getrandbits(63)

    def _probe(self, rid: str) -> None:
        """An idle scheduler runs one token; a busy one answers with its next step."""
        if self.engine.busy:
            self._probed = True
            return
        self._add({
            "rid": rid, "ids": [0], "crash": False, "interval": 1, "stream": False,
            "sampling": {
                "max_new_tokens": 1, "min_new_tokens": 0, "temperature": 0, "ignore_eos": False,
                "stop_token_ids": [], "stop": [], "stop_regex": [], "sampling_seed": None,
            },
        })  # fmt: skip

    def _flush(self) -> bool:
        if self.engine.flush():
            self.log.info("Cache flushed successfully!")
            return True
        self.log.error(
            "Cache not flushed because there are pending requests. "
            f"#queue-req: {len(self.engine.waiting)}, #running-req: {len(self.engine.running)}"
        )
        return False

    # -- one step --

    def _wait(self, step: Step) -> None:
        """Take as long as the step takes; a machine too slow for --sim-speed falls behind for good."""
        seconds = step.duration_s * self._slow / self.sim.sim_speed
        if all(rid.startswith(WARM_UP) for rid in self._jobs):
            seconds = 0.0
        elif step.kind == "idle":  # work that does not fit now, and nothing running: cannot last
            seconds = 0.01
        self._now_s = self._elapsed_s() + seconds * self.sim.sim_speed
        self._due = max(self._due, time.monotonic() - 0.05) + seconds
        if (left := self._due - time.monotonic()) > 0:
            time.sleep(left)

    def _check(self, step: Step) -> None:
        """Crash if this step is one that kills."""
        stamp = time.time()
        for request, _ in step.prefills:
            job = self._jobs[request.rid]
            job.admitted = job.admitted or stamp - step.duration_s / self.sim.sim_speed
            job.prefilled = stamp if request is not self.engine.chunked else 0.0
            if poison := job.poison:
                self._act([Fault(poison)])
        chunk = self.loaded.config.chunk_tokens
        if (
            step.kind == "prefill"
            and step.running >= self.sim.sim_oom_running
            and step.prefill_tokens * 2 >= chunk
            and not self.loaded.plan.full_prefill_fits(chunk)
        ):
            acting.crash(self.log, "oom", False, self._memory_facts())
        if step.retracted and self._collapsing:
            self._slow = _COLLAPSE

    def _report(self, step: Step) -> None:
        """Send what is due, each request by its own interval."""
        if step.kind == "prefill":
            candidates = step.started + [request for request in step.finished if request not in step.started]
        else:
            candidates = [*self.engine.running.values(), *step.finished]
        due = []
        for request in candidates:
            job = self._jobs[request.rid]
            count = len(job.stream.output_ids)
            interval = job.interval if job.streamed else _UNSTREAMED_INTERVAL
            if request.finish or interval <= 1 or count % interval == (1 if job.streamed else 0):
                due.append(job)
        if due or self._probed:
            self._send_outputs(due)
            self._probed = False
        elif time.monotonic() - self._published > _PUBLISH_S:
            self._publish()

    def _send_outputs(self, jobs: list[_Job]) -> None:
        outputs = []
        for job in jobs:
            request, ids = job.request, job.stream.output_ids
            if request.finish:
                del self._jobs[request.rid]
                self._answers += not request.rid.startswith((WARM_UP, PROBE))
            outputs.append([
                request.rid, ids[job.sent :], request.finish.to_json() if request.finish else None,
                request.cached_tokens, request.retractions, job.stream.reasoning_tokens,
                job.received, job.admitted, job.prefilled,
            ])  # fmt: skip
            job.sent = len(ids)
        self._published = time.monotonic()
        self.link.send({"t": "out", "o": outputs, "l": self._figures.snapshot()})

    def _publish(self) -> None:
        self._published = time.monotonic()
        self.link.send({"t": "load", "l": self._figures.snapshot()})

    # -- faults --

    def _act(self, faults: Sequence[Fault]) -> None:
        for fault in faults:
            if fault.name == "collapse":
                self._collapsing = True
            elif fault.name == "leak":
                self._leaking = True
            else:
                acting.act(
                    fault, self.log, self.sim.sim_speed, self.args["watchdog_timeout"], self._memory_facts()
                )

    def _memory_facts(self) -> dict[str, float]:
        plan = self.loaded.plan
        memory, free = plan.memory, max(0.05, plan.headroom_gib)
        return {"gpu": memory.gpu, "free": free, "used": memory.gpu - free, "kv_tokens": plan.kv_tokens}
