"""What engine processes of these tests run: the real engine on the fake executor. Imports little."""

from __future__ import annotations

import os
import time
from typing import Any

from byte_model import make_engine

from lmdeploy.engine.batch import Batch
from lmdeploy.engine.loop import Engine
from lmdeploy.errors import ModelError

FACTORY = "serve_engine:build"
CRASH = 7  # an id (a control character) whose arrival in a batch ends the process


def build(config: dict[str, Any]) -> Engine:
    """The factory that engine processes run.

    `step_seconds` is the time a step takes; with `crashes` the process aborts at the id CRASH.
    """
    config = dict(config)
    if config.pop("broken", False):
        raise ModelError("no such model")
    seconds = config.pop("step_seconds", 0.0)
    crashes = config.pop("crashes", False)

    def on_step(batch: Batch) -> None:
        time.sleep(seconds)
        if crashes and (batch.token_ids == CRASH).any():
            os.abort()

    return make_engine(config.pop("script", ""), on_step=on_step, **config)
