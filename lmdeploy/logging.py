"""The one logger of the project: named `lmdeploy`, on standard error.

REQUEST lies between INFO and DEBUG and shows prompts. Modules ask `get_logger()`; only a command or
`pipeline()` calls `set_up`.
"""

from __future__ import annotations

import logging
import sys

from lmdeploy.errors import ConfigError

REQUEST = 15
LEVELS = ("CRITICAL", "ERROR", "WARNING", "INFO", "REQUEST", "DEBUG", "NOTSET")

logging.addLevelName(REQUEST, "REQUEST")


class _CurrentStderr(logging.StreamHandler):  # type: ignore[type-arg]
    """Writes to what `sys.stderr` is at the time, so that a redirection made later is honoured."""

    def emit(self, record: logging.LogRecord) -> None:
        self.stream = sys.stderr
        super().emit(record)


def get_logger() -> logging.Logger:
    """The project's logger."""
    return logging.getLogger("lmdeploy")


def set_up(level: str = "WARNING") -> logging.Logger:
    """Set the level; attach the one handler unless the program around us has its own. Raises ConfigError."""
    name = level.upper()
    if name not in LEVELS:
        raise ConfigError(f"log level {level}: must be one of {', '.join(LEVELS)}")
    logger = get_logger()
    logger.setLevel(REQUEST if name == "REQUEST" else getattr(logging, name))
    if not logger.hasHandlers():
        handler = _CurrentStderr()
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
        logger.addHandler(handler)
    return logger
