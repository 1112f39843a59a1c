"""What is measured: mill, SGLang client and store as a run has them, without Prefect.

python -m benchmarks.client.ours FOLDER MANIFEST.json URL IN_FLIGHT stream|whole WARM_UP STORE
"""

from __future__ import annotations

import json
import sys
import threading
from pathlib import Path

from benchmarks.client.meter import Meter, cpu_s, rss_mb
from promptmill.generation import window
from promptmill.generation.mill import Finished
from promptmill.profile import load_profile
from promptmill.run import Run, RunRequest
from promptmill.serving.facts import Facts
from promptmill.serving.server import Server
from promptmill.types import Manifest


def main() -> None:
    folder, manifest_path, url, in_flight, mode, warm_up, store = sys.argv[1:]
    manifest = Manifest.from_json(json.loads(Path(manifest_path).read_text()))
    settings = [f"server.max_in_flight={in_flight}", f"server.stream={str(mode == 'stream').lower()}"]
    settings += [f"classes.short.max_new_tokens={manifest.max_new_tokens}", f"store.url={store}"]
    run = Run.read(load_profile(f"{folder}/profile.toml", settings), RunRequest())
    window.START = int(in_flight)  # the server has no queue for it to follow
    run.store.journal_path.parent.mkdir(parents=True)
    run.store.open("benchmark")
    with run.mill([manifest]) as mill:
        waiter = threading.Thread(target=mill.generate, args=(manifest.partition,))
        with Meter(mill.done, int(warm_up), manifest.prompts - int(in_flight)) as meter:
            waiter.start()
            mill.attach(Server("benchmark", url, ""), Facts("benchmark"))
            while not isinstance(mill.wait(1.0), Finished):
                pass
        waiter.join()
        seal_s = cpu_s() - meter.cpu_s_at(manifest.prompts)
    rss = rss_mb()
    run.store.close()
    counts = run.tally([manifest])[0].to_json()
    assert counts["rows"] == counts["answered"] + counts["truncated"] == manifest.prompts, counts
    more = {"seal_cpu_s_per_1000": round(seal_s * 1000 / manifest.prompts, 3), "rss_at_end_mb": round(rss, 1)}
    print(json.dumps({**meter.result(), **more}))


if __name__ == "__main__":
    main()
