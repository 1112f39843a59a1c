"""llama.cpp's own HTTP server in a process of its own, from the wheel xllamacpp.

    python -m promptmill.serving.embedded --model FILE.gguf --port 8080 [llama-server's flags]

It takes the few flags of llama-server that we use, under their names, so that a profile can name a real
`llama-server` as its command instead. The key comes from LLAMA_API_KEY, as there.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys


def main() -> int:
    parser = argparse.ArgumentParser(prog="promptmill.serving.embedded", allow_abbrev=False)
    parser.add_argument("--model", required=True)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--alias", default="")
    parser.add_argument("--ctx-size", type=int, default=16384, help="KV tokens, shared out among the slots")
    parser.add_argument("--parallel", type=int, default=4, help="slots")
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--chat-template-file", default="")
    args = parser.parse_args()

    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = args.model
    params.hostnames = [args.host]
    params.port = args.port
    params.n_ctx = args.ctx_size
    params.n_parallel = args.parallel
    params.use_jinja = True
    if args.alias:
        params.model_alias = {args.alias}
    if args.threads:
        params.cpuparams.n_threads = args.threads
    if args.chat_template_file:
        with open(args.chat_template_file, encoding="utf-8") as file:  # noqa: PTH123  kept free of imports
            params.chat_template = file.read()
    if key := os.environ.get("LLAMA_API_KEY"):
        params.api_keys = [key]
    server = xllamacpp.Server(params)
    print(f"ready on {server.listening_address}", flush=True)  # noqa: T201  the log of this life
    signal.pause()
    return 0


if __name__ == "__main__":
    sys.exit(main())
