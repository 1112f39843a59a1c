"""Log lines as SGLang writes them, by version."""

from __future__ import annotations

import os
import time
from typing import Any

from promptmill.sim.request import Step

_QUIET = {"warning", "error", "critical"}


class Log:
    """One process's log on stderr; `rank` is ` TP0` and the like, empty on a single GPU."""

    def __init__(
        self, version: str = "0.5.23", rank: str = "", level: str = "info", gpu: bool = True
    ) -> None:
        self.old = version.startswith("0.5.9")
        self.rank = rank
        self.gpu = gpu
        self._quiet = level.lower() in _QUIET

    def info(self, message: str) -> None:
        if not self._quiet:
            self.error(message)

    def error(self, message: str) -> None:
        """Also for warnings: they are shown at every level that matters here."""
        self.raw(f"[{time.strftime('%Y-%m-%d %H:%M:%S')}{self.rank}] {message}")

    def raw(self, text: str) -> None:
        """A whole line in one write, since several processes share the file."""
        os.write(2, (text + "\n").encode())

    def access(self, client: str, method: str, path: str, status: int, reason: str) -> None:
        self.info(f'INFO:     {client} - "{method} {path} HTTP/1.1" {status} {reason}')

    # -- the scheduler's --

    def prefill(
        self, step: Step, kv_tokens: int, running: int, queued: int, pending: int, rate: float
    ) -> None:
        graph = f"{self._graph}: False"
        rate_text = f"input throughput (token/s): {rate:.2f}"
        tail = f"{rate_text}, {graph}" if self.old else f"#pending-token: {pending}, {graph}, {rate_text}"
        self.info(
            f"Prefill batch, #new-seq: {step.new_seqs}, #new-token: {step.prefill_tokens}, "
            f"#cached-token: {step.cached_tokens}, token usage: {step.used_tokens / kv_tokens:.2f}, "
            f"#running-req: {running}, #queue-req: {queued}, {tail}"
        )

    def decode(self, running: int, used: int, kv_tokens: int, rate: float, queued: int, graphs: bool) -> None:
        self.info(
            f"Decode batch, #running-req: {running}, #token: {used}, token usage: {used / kv_tokens:.2f}, "
            f"{self._graph}: {graphs}, gen throughput (token/s): {rate:.2f}, #queue-req: {queued}"
        )

    def retraction(self, step: Step) -> None:
        self.error(
            f"KV cache pool is full. Retract requests. #retracted_reqs: {len(step.retracted)}, "
            f"#new_tokens_gained: {step.gained_tokens}, "
            f"#new_token_ratio: {step.ratio_before:.4f} -> {step.ratio_after:.4f}"
        )

    def weights(self, plan: Any, architecture: str, elapsed_s: float) -> None:
        self.info(
            f"Load weight end. elapsed={elapsed_s:.2f} s, type={architecture}, "
            f"{'' if self.old or not self.gpu else 'dtype=torch.bfloat16, '}"
            f"avail mem={plan.after_weights_gib:.2f} GB, mem usage={plan.memory.weights:.2f} GB."
        )

    def kv_cache(self, plan: Any, tokens: int) -> None:
        """Latent attention has one cache, other models two of half the size."""
        dtype = "" if self.old else f"dtype: {plan.kv_dtype}, "
        half = plan.kv_gib / 2
        size = (
            f"KV size: {plan.kv_gib:.2f} GB" if self.gpu else f"K size: {half:.2f} GB, V size: {half:.2f} GB"
        )
        self.info(f"KV Cache is allocated. {dtype}#tokens: {tokens}, {size}")

    def graphs_begin(self, before_gib: float) -> None:
        if self.old:
            self.info(
                "Capture cuda graph begin. This can take up to several minutes. "
                f"avail mem={before_gib:.2f} GB"
            )
        else:
            self.info(
                "Capture target decode CUDA graph begin. backend=full, num_tokens_per_req=1, "
                f"avail mem={before_gib:.2f} GB"
            )

    def graphs_end(self, plan: Any, elapsed_s: float) -> None:
        used, left = plan.graph_gib, plan.headroom_gib
        if self.old:
            self.info(
                f"Capture cuda graph end. Time elapsed: {elapsed_s:.2f} s. mem usage={used:.2f} GB. "
                f"avail mem={left:.2f} GB."
            )
        else:
            self.info(
                f"Capture target decode CUDA graph end. bs=[1, 2, 4, 8, 16, 32, 64, 128, 256], "
                f"elapsed={elapsed_s:.2f} s, mem usage={used:.2f} GB, avail mem={left:.2f} GB."
            )

    @property
    def _graph(self) -> str:
        if not self.gpu:
            return "cpu graph"
        return "cuda graph" if self.old else "CUDA graph"
