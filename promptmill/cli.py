"""The command `promptmill`. Heavy packages are imported where a command needs them: --help stays quick.

Exit status: 0 all rows are accounted for and released (or nothing was new) · 1 rows are pending or failed,
the release was refused, or another run holds the lock · 2 configuration error, nothing was started ·
3 stopped on purpose with rows pending · 130 interrupted.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from promptmill.errors import ConfigError, LockHeld, PromptmillError

if TYPE_CHECKING:
    from promptmill.types import Tally

OK, INCOMPLETE, CONFIG, STOPPED, INTERRUPTED = 0, 1, 2, 3, 130


def main(argv: list[str] | None = None) -> int:
    parser = _parser()
    args, rest = parser.parse_known_args(argv)
    if args.command is not _sim and rest:
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    args.rest = rest
    command: Callable[[argparse.Namespace], int] = args.command
    try:
        return command(args)
    except ConfigError as error:
        return _complain(error, CONFIG)
    except PromptmillError as error:
        return _complain(error, INCOMPLETE)
    except KeyboardInterrupt:
        return _complain("interrupted; what was answered is kept.", INTERRUPTED)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or the interpreter complains at exit
        return INCOMPLETE
    except Exception as error:  # noqa: BLE001  the one place: a user gets a message and a file, no traceback
        return _unexpected(error)


def _parser() -> argparse.ArgumentParser:
    from promptmill import __version__

    parser = argparse.ArgumentParser(
        prog="promptmill",
        description="Prompts in, a training dataset out, with a model that you serve yourself.",
        epilog="PROFILE is a name in deployments/ or the path of a TOML file.",
    )
    parser.add_argument("--version", action="version", version=f"promptmill {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def add(name: str, command: Callable[[argparse.Namespace], int], text: str) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=text, description=text)
        sub.add_argument("profile", metavar="PROFILE")
        sub.add_argument(
            "--set",
            action="append",
            default=[],
            metavar="a.b=value",
            dest="overrides",
            help="override a setting",
        )
        sub.set_defaults(command=command)
        return sub

    run = add(
        "run", _run, "Answer every prompt and publish the dataset; a later run goes on where this ends."
    )
    run.add_argument("--retry-failed", action="store_true", help="ask again what failed in earlier runs")
    run.add_argument("--refresh", action="store_true", help="read and render the prompts again")
    run.add_argument(
        "--accept-redo", action="store_true", help="go on though many answered rows would be asked again"
    )
    plan = add("plan", _plan, "Read, render and count the prompts, and estimate the hours; starts no server.")
    plan.add_argument(
        "--kv-tokens",
        action="append",
        type=int,
        default=[],
        metavar="N",
        help="estimate the hours on servers with so many KV tokens; several times for several sizes",
    )
    plan.add_argument("--mean-output", type=float, metavar="N", help="tokens of an answer, on average")
    plan.add_argument("--plot", type=Path, metavar="FILE.png", help="draw it as well; needs matplotlib")
    for sub in (run, plan):
        sub.add_argument("--partition", action="append", default=[], metavar="NAME", help="only this one")
        sub.add_argument("--limit", type=int, metavar="N", help="rows to read of each partition")
    status = add("status", _status, "The accounting, from the store alone.")
    for sub in (plan, status):
        sub.add_argument("--json", action="store_true", help="as one JSON object")
    show = add("show", _show, "Prompts and their answers, reasoning apart.")
    show.add_argument("id", nargs="?", help="only the row with this id")
    show.add_argument("--partition", metavar="NAME", help="only rows of this partition")
    show.add_argument(
        "--flag",
        metavar="NAME",
        help="only answers with this flag or of this status; `rejected` shows rows that cannot be asked",
    )
    show.add_argument("--random", type=int, metavar="N", help="N rows at random")
    reflag = add("reflag", _reflag, "Split and judge all answers anew, from their ids; no server is started.")
    reflag.add_argument("--dry-run", action="store_true", help="say what would change, and change nothing")
    reflag.add_argument("--json", action="store_true", help="as one JSON object")
    add("doctor", _doctor, "Everything that can be checked before GPU time is spent; starts nothing.")
    add("stop", _stop, "Ask the running run to finish what is in flight, seal and end.")
    add("settings", _settings, "The resolved settings as JSON, secrets masked.")
    text = "A simulated SGLang server: SGLang's flags, HTTP and log lines, faults on request, no GPU."
    sim = commands.add_parser("sim", help=text, description=text, add_help=False)
    sim.set_defaults(command=_sim)
    return parser


def _run(args: argparse.Namespace) -> int:
    from promptmill import local_api
    from promptmill.console import print_accounting, shown
    from promptmill.profile import load_profile
    from promptmill.run import RunRequest, check
    from promptmill.store.store import journal_path
    from promptmill.types import STATUSES, Tally

    # SIGTERM ends a run in good order, as Ctrl-C does. Prefect hands the signal on to us at a flow's end.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    profile = load_profile(args.profile, args.overrides)
    check(profile, RunRequest(tuple(args.partition), args.limit))
    os.environ.update({name: value for name, value in local_api.QUIET.items() if name not in os.environ})
    folder = journal_path(profile).parent / "servers"
    api = local_api.LocalApi(folder) if local_api.is_wanted() else None
    try:
        if api is not None:
            print("starting a Prefect API for this run (none is configured) …", flush=True)
            api.start()
            os.environ["PREFECT_API_URL"] = api.url
        flow = _quiet_flow(folder.parent / "promptmill.log")
        if api is not None:
            api.wait()
        with shown():
            state = flow(
                profile=args.profile,
                partitions=args.partition,
                limit=args.limit,
                overrides=args.overrides,
                refresh=args.refresh,
                retry_failed=args.retry_failed,
                accept_redo=args.accept_redo,
                return_state=True,
            )
        if state.is_cancelled():
            raise LockHeld(state.message or "another run holds the store.")
        report: dict[str, Any] = state.result()
    finally:
        if api is not None:
            _drain_prefect()
            api.stop()
    tallies = []
    for name, counts in report["partitions"].items():
        tally = Tally(name)
        tally.counts.update({status: counts[status] for status in STATUSES})
        tallies.append(tally)
    print_accounting(tallies)
    _warn_of_useless(tallies)
    return _report_end(report, tallies)


def _warn_of_useless(tallies: list[Tally]) -> None:
    """What the exit status does not say: rows that ended, and are of no use for training."""
    for tally in tallies:
        useless = {status: tally.counts[status] for status in ("truncated", "empty") if tally.counts[status]}
        if 2 * sum(useless.values()) > tally.rows - tally.counts["rejected"]:
            shown = ", ".join(f"{n} {status}" for status, n in useless.items())
            print(
                f"WARNING: {tally.partition}: {shown} of {tally.rows} rows. Look at some "
                "(promptmill show PROFILE --flag truncated); raise max_new_tokens of its class, or see "
                "chat.reasoning.",
                file=sys.stderr,
            )


def _report_end(report: dict[str, Any], tallies: list[Tally]) -> int:
    if release := report["release"]:
        news = "" if release["new"] else " (nothing new)"
        print(f"release: {release['path']}{news}")
    if report["stopped"] and any(tally.pending for tally in tallies):
        print(f"stopped: {report['stopped']}; the next run goes on from here.")
        return STOPPED
    failed = sum(tally.counts["failed"] for tally in tallies)
    if failed:
        print(f"{failed} rows failed; `promptmill show PROFILE --flag failed` names them.", file=sys.stderr)
    return INCOMPLETE if failed or any(tally.pending for tally in tallies) else OK


def _drain_prefect() -> None:
    """Let Prefect's own threads deliver what they hold, while there still is an API to take it."""
    if "prefect" in sys.modules:
        from prefect.events.worker import EventsWorker
        from prefect.logging.handlers import APILogWorker

        APILogWorker.drain_all(timeout=5)
        EventsWorker.drain_all(timeout=5)


def _quiet_flow(log: Path) -> Callable[..., Any]:
    """The flow, with everything that Prefect would print in `log` instead."""
    import logging

    from flows.regenerate import regenerate

    log.parent.mkdir(parents=True, exist_ok=True)
    handler = logging.FileHandler(log, encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    loggers = [logging.getLogger(), *(logging.getLogger(name) for name in logging.root.manager.loggerDict)]
    for logger in loggers:
        for old in list(logger.handlers):
            if isinstance(old, logging.StreamHandler):  # the console's; what goes to the API stays
                logger.removeHandler(old)
                logger.addHandler(handler)
    logging.getLogger().addHandler(handler)
    return regenerate


def _plan(args: argparse.Namespace) -> int:
    from promptmill.planning.plan import make_plan
    from promptmill.planning.plot import check_plot, draw
    from promptmill.profile import load_profile
    from promptmill.run import Run, RunRequest, check_request

    profile = load_profile(args.profile, args.overrides)
    request = RunRequest(tuple(args.partition), args.limit)
    check_request(profile, request)
    if args.plot:
        check_plot(args.plot)
    plan = make_plan(Run.read(profile, request), args.kv_tokens, args.mean_output)
    if args.json:
        print(json.dumps(plan.to_json(), indent=1))
    else:
        for line in plan.lines():
            print(line)
    if args.plot:
        draw(plan, args.plot)
    return OK


def _status(args: argparse.Namespace) -> int:
    from promptmill.console import print_accounting
    from promptmill.profile import load_profile
    from promptmill.prompts.manifest import load_current
    from promptmill.store.store import Store
    from promptmill.types import Tally

    profile = load_profile(args.profile, args.overrides)
    store = Store(profile)
    store.refresh()
    current = {part.name: load_current(store.manifests, part.name) for part in profile.partitions}
    tallies = [store.tally(m) if m is not None else Tally(name) for name, m in current.items()]
    if args.json:
        about = {"holder": store.lock.holder(), "release": _pointer(profile.release.url)}
        print(json.dumps({"partitions": {t.partition: t.to_json() for t in tallies}, **about}, indent=1))
        return OK
    print_accounting(tallies)
    if unread := [name for name, manifest in current.items() if manifest is None]:
        print(f"not read yet: {', '.join(unread)}")
    if holder := store.lock.holder():
        print(f"running: {holder}")
    if pointer := _pointer(profile.release.url):
        print(f"release: {pointer['path']}")
    return OK


def _pointer(url: str) -> Any:
    from promptmill.release.dataset import POINTER
    from promptmill.store.objects import open_folder

    found = open_folder(url).read_bytes(POINTER)
    try:
        pointer = json.loads(found) if found else None
    except ValueError:  # not ours; a run says what to do about it
        return None
    return pointer if isinstance(pointer, dict) and "path" in pointer else None


def _show(args: argparse.Namespace) -> int:
    from promptmill.profile import load_profile
    from promptmill.show import Filter, show

    profile = load_profile(args.profile, args.overrides)
    shown = show(profile, Filter(args.id, args.partition, args.flag, args.random))
    if not shown:
        print("no answer fits.", file=sys.stderr)
    return OK if shown else INCOMPLETE


def _reflag(args: argparse.Namespace) -> int:
    from promptmill.profile import load_profile
    from promptmill.reflag import reflag

    changes = reflag(load_profile(args.profile, args.overrides), args.dry_run)
    if args.json:
        print(json.dumps({"partitions": {name: c.to_json() for name, c in changes.items()}}, indent=1))
        return OK
    for name, c in changes.items():
        print(f"{name}: {c.changed:,} of {c.answers:,} answers judged otherwise, {c.texts:,} with other text")
        for what, counts in (("status", c.statuses), ("gained", c.gained), ("lost", c.lost)):
            for value, n in counts.most_common():
                print(f"  {n:,} {what}: {value}")
    changed = any(c.changed for c in changes.values())
    if changed and not args.dry_run:
        print("promptmill run publishes them as they are judged now.")
    elif not changes:
        print("there is no answer yet.")
    return OK


def _stop(args: argparse.Namespace) -> int:
    from promptmill.profile import load_profile
    from promptmill.store.store import Store

    store = Store(load_profile(args.profile, args.overrides))
    holder = store.lock.holder()
    if not holder:
        print("no run is under way. One that has only just begun is seen once it has loaded the tokenizer.")
        return OK
    store.stop_file.touch()
    print(f"asked to stop: {holder}. It finishes what is in flight; a later run goes on.")
    return OK


def _doctor(args: argparse.Namespace) -> int:
    from promptmill.doctor import examine
    from promptmill.profile import load_profile

    wrong = 0
    for finding in examine(load_profile(args.profile, args.overrides)):
        wrong += finding.level == "wrong"
        print(f"{finding.level:<5}  {finding.subject}: {finding.text}")
    print(f"{wrong} to mend before a run." if wrong else "nothing stands in the way of a run.")
    return CONFIG if wrong else OK


def _sim(args: argparse.Namespace) -> int:
    from promptmill.sim.server import main as sim

    return sim(args.rest)


def _settings(args: argparse.Namespace) -> int:
    from promptmill.profile import load_profile

    print(json.dumps(load_profile(args.profile, args.overrides).masked(), indent=1))
    return OK


def _complain(error: object, status: int) -> int:
    print(f"promptmill: {error}", file=sys.stderr)
    return status


def _unexpected(error: Exception) -> int:
    handle, name = tempfile.mkstemp(prefix="promptmill-", suffix=".log")
    with os.fdopen(handle, "w", encoding="utf-8") as file:
        file.write("".join(traceback.format_exception(error)))
    what = f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"
    return _complain(f"something unforeseen happened ({what}); what was answered is kept. Details: {name}", 1)


if __name__ == "__main__":
    sys.exit(main())
