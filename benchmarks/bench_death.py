"""What deaths cost: of the server, of the client, and by poisoned prompts. On the simulator.

    .venv/bin/python benchmarks/bench_death.py [--quick] [server | client | poison]

Prints one JSON object. A run of 600 prompts with 150 in flight has 20 deaths (SIGKILL) at random moments of a
full window. `decoded_twice` is what the simulator decoded for prompts, sent or not, less what the answers
hold. `bound_a_death` is flush interval × throughput + one stream interval a request. `refilled` are the
tokens of prompts and kept answers that were sent again: they are prefilled, not decoded. --quick: 360 prompts
with 3 deaths, at twice the speed, of the server alone; by name also of the client, or 1 poisonous prompt
among 130.
"""

from __future__ import annotations

import json
import os
import random
import sys
import tempfile
import time
from collections import deque
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tokenizers import Tokenizer

from promptmill.generation.loop import _FLUSH_S
from promptmill.types import Answer
from tests.chaos.rogue import Plan, asked, generated
from tests.chaos.rounds import Moment, Trial, disturb
from tests.chaos.small_run import durable
from tests.contract.play import FLAGS, write_prompts
from tests.contract.sglang_place import Engine, sim_model

QUICK = "--quick" in sys.argv
DEATHS, IN_FLIGHT, PROMPTS, STREAM_INTERVAL = 3 if QUICK else 20, 150, 360 if QUICK else 600, 32
POISONED, AMONG = (1, 130) if QUICK else (3, 400)
SETTINGS = [
    "sampling.temperature=0",
    f"server.max_in_flight={IN_FLIGHT}",
    f"server.stream_interval={STREAM_INTERVAL}",
    "server.inactivity_timeout_s=20",
    "server.startup_silence_timeout_s=60",
    "server.startup_timeout_s=120",
    "classes.short.max_new_tokens=1500",
    "run.min_free_gib=0",
]
PACE = {"sim-mean-output": 500, "sim-start-s": 2, "max-running-requests": IN_FLIGHT}
SPEED, POISON_SPEED = 8 if QUICK else 4, 20
SEED = 1
WORDS = (" zebra", " winter", " table", " orange", " guitar", " silver", " planet", " engine", " bridge")
LIMIT_S = 900.0


def main() -> None:
    named = [arg for arg in sys.argv[1:] if arg != "--quick"]
    wanted = named or (["server"] if QUICK else ["server", "client", "poison"])
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = sim_model(folder)
        result: dict[str, Any] = {"benchmark": "death", "load": os.getloadavg(), "in_flight": IN_FLIGHT}
        if "server" in wanted or "client" in wanted:
            undisturbed = start(folder / "undisturbed", model, SPEED)
            run(undisturbed, [])
            for what, death in {"server": "kill main", "client": "client"}.items():
                if what in wanted:
                    result[what] = with_deaths(start(folder / what, model, SPEED), death, undisturbed)
        if "poison" in wanted:
            result["poison"] = poisoned(folder, model)
        result["load_after"] = os.getloadavg()
    print(json.dumps(result, indent=1))


def start(folder: Path, model: Path, speed: int) -> Trial:
    """The place of a run without faults of the server's own."""
    folder.mkdir()
    write_prompts(folder, PROMPTS)
    return place(folder, model, Plan(), **{"sim-speed": speed})


def place(folder: Path, model: Path, plan: Plan, **flags: Any) -> Trial:
    plan.write(folder)
    rogue = [sys.executable, "-m", "tests.chaos.rogue", str(folder)]
    profile = Engine(rogue, model, flags=FLAGS).write_profile(folder, **{**PACE, **flags})
    return Trial(folder, profile, SETTINGS, quick=False)


def run(trial: Trial, moments: list[Moment]) -> int:
    """Through all moments, to its end; returns the exit status."""
    coming = deque(moments)
    try:
        while True:
            process = trial.start()
            disturb(trial, process, coming, LIMIT_S)
            if (status := trial.ended(process)) >= 0:
                return status
            trial.note_kept()
    finally:
        trial.end()


def outputs_of(trial: Trial) -> dict[str, list[int]]:
    return {key: answer.output_ids for key, answer in answers_of(trial).items()}


def answers_of(trial: Trial) -> dict[str, Answer]:
    trial.store.refresh()
    return trial.store.lookup(trial.keys())


def with_deaths(trial: Trial, what: str, undisturbed: Trial) -> dict[str, Any]:
    chance = random.Random(SEED)
    room = (PROMPTS - IN_FLIGHT) / DEATHS
    moments = [
        Moment(int(n * room + chance.uniform(0, room)), chance.uniform(0, 1.0), what, IN_FLIGHT)
        for n in range(DEATHS)
    ]
    began = time.monotonic()
    status = run(trial, moments)
    took_s = time.monotonic() - began
    trial.check_books()
    outputs, requests = outputs_of(trial), asked(trial.folder)
    held, decoded = sum(map(len, outputs.values())), generated(trial.folder)
    first: set[str] = set()
    refilled = 0
    for request in requests:
        refilled += request.tokens if request.key in first else 0
        first.add(request.key)
    happened = sum(what in words and "nobody" not in words for words in trial.happened)
    throughput = tokens_per_s(undisturbed)
    bound = _FLUSH_S * throughput + IN_FLIGHT * STREAM_INTERVAL
    twice = decoded - held
    return {
        "exit_status": status,
        "deaths": happened,
        "took_s": round(took_s),
        "answers": len(outputs),
        "equal_to_undisturbed": outputs == outputs_of(undisturbed),
        "finished_asked_again": 0,  # check_books raises otherwise
        "tokens_held": held,
        "decoded_twice": twice,
        "decoded_twice_a_death": round(twice / max(1, happened)),
        "share_of_run_a_death": round(twice / max(1, happened) / held, 5),
        "tokens_per_s": round(throughput),
        "bound_a_death": round(bound),
        "stream_intervals_a_death": IN_FLIGHT * STREAM_INTERVAL,
        "refilled": refilled,
        "refilled_a_death": round(refilled / max(1, happened)),
    }


def tokens_per_s(trial: Trial) -> float:
    """Over the whole run, its thin end included."""
    held = sum(map(len, outputs_of(trial).values()))
    return held / (durable(trial.folder)[-1].at - asked(trial.folder)[0].at)


def poisoned(folder: Path, model: Path) -> dict[str, Any]:
    """A few among many, each of which kills the server whenever it is taken in."""
    texts = [f"Tell me about {n}." for n in range(AMONG)]
    short = {"sim-speed": POISON_SPEED, "sim-mean-output": 50}
    healthy, place_ = folder / "healthy", folder / "poison"
    for one in (healthy, place_):
        one.mkdir()
    write_prompts(healthy, texts)
    run(trial := place(healthy, model, Plan(), **short), [])
    word, token = unheard_of(model, outputs_of(trial))
    guilty = sorted(random.Random(SEED).sample(range(AMONG), POISONED))
    for n in guilty:
        texts[n] += word
    write_prompts(place_, texts)
    trial = place(place_, model, Plan(always=[f"die@token={token}"]), **short)
    status = run(trial, [])
    answers = answers_of(trial)
    failed = {answer.prompt_hash for answer in answers.values() if answer.status == "failed"}
    guilty_hashes = {answer.prompt_hash for answer in answers.values() if token in answer.prompt_ids}
    named = [words for words in trial.outcome["told"] if "quarantine" in words.lower()]
    return {
        "prompts": len(texts),
        "poisoned": [f"r{n}" for n in guilty],
        "deaths": trial.outcome["deaths"],
        "deaths_a_poisoned_prompt": round(trial.outcome["deaths"] / POISONED, 2),
        "quarantined": len(failed),
        "named": [n for n in guilty if any(f"row r{n} of" in words for words in named)],
        "innocents_failed": len(failed) - len(failed & guilty_hashes),
        "accounting": trial.outcome["accounting"],
        "exit_status": status,
        "finished_twice": len(durable(place_)) - len(answers),
    }


def unheard_of(model: Path, outputs: dict[str, list[int]]) -> tuple[str, int]:
    """A word and its id that no answer has: an answer that goes on from its own tokens is no poison."""
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    heard = {token for ids in outputs.values() for token in ids}
    for word in WORDS:
        ids = tokenizer.encode(word, add_special_tokens=False).ids
        if len(ids) == 1 and ids[0] not in heard:
            return word, ids[0]
    raise AssertionError("more words are needed")


if __name__ == "__main__":
    main()
