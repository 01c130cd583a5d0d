"""Looks at the engines while the server runs, and says every ten seconds how each one fares.

Owns the line in the log. Knows no HTTP.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from typing import Any

from lmdeploy.serve.binding import ADVICE, WINDOW, Binding
from lmdeploy.serve.metrics import ask
from lmdeploy.serve.served import Served, Server

logger = logging.getLogger("lmdeploy.serve")

_LOOK_SECONDS = 1.0


class Monitor:
    """Runs for ever as a task of the server's loop."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._before = {id(served): _counts(served) for served in server.models}

    async def run(self) -> None:
        looks = 0
        while True:
            await asyncio.sleep(_LOOK_SECONDS)
            await asyncio.gather(*(ask(served) for served in self._server.models))
            looks += 1
            if looks * _LOOK_SECONDS >= WINDOW:
                looks = 0
                for served in self._server.models:
                    logger.info("%s", self._line(served))

    def _line(self, served: Served) -> str:
        now = _counts(served)
        rates = {name: (now[name] - self._before[id(served)][name]) / WINDOW for name in now}
        self._before[id(served)] = now
        return status_line(
            served.ids[0], served.client.state, served.client.last_stats, rates, served.watch.binding()
        )


def _counts(served: Served) -> dict[str, float]:
    times = served.times
    return {"prompt": times.prompt_tokens, "generated": times.generated_tokens, "cached": times.cached_tokens}


def status_line(
    name: str, state: str, stats: Mapping[str, Any], rates: Mapping[str, float], binding: Binding
) -> str:
    """One engine in one line. `rates`: tokens a second, prompt, generated and cached."""
    if state != "ready":
        return f"{name}: the engine is {state}"
    held = stats.get("blocks_held", 0) / max(stats.get("blocks_total", 0), 1)
    hits = rates["cached"] / rates["prompt"] if rates["prompt"] else 0.0
    bound = binding.bound
    advice = f" ({ADVICE[bound]})" if ADVICE[bound] else ""
    return (
        f"{name}: running {stats.get('running', 0)}, waiting {stats.get('waiting', 0)}; "
        f"{rates['prompt']:.0f} prompt and {rates['generated']:.0f} generated tokens/s; "
        f"KV cache {held:.0%}, prefix hits {hits:.0%}; U {binding.utilisation:.0%}; "
        f"bound by {bound} for {binding.shares[bound]:.0%} of the time{advice}"
    )
