"""Environment variables and the logger."""

from __future__ import annotations

import io
import logging
import re
import sys
from pathlib import Path

import pytest

from lmdeploy import env
from lmdeploy.env import Variable
from lmdeploy.errors import ConfigError
from lmdeploy.logging import REQUEST, get_logger, set_up


def test_the_table_is_complete_and_explained() -> None:
    declared = {v for v in vars(env).values() if isinstance(v, Variable)}
    assert set(env.VARIABLES) == declared
    assert len({v.name for v in env.VARIABLES}) == len(env.VARIABLES)
    assert all(v.help for v in env.VARIABLES)


def test_every_set_of_kernels_can_be_asked_for() -> None:
    kernels = Path(__file__).parents[2] / "lmdeploy" / "turbomind" / "csrc" / "kernels"
    tables = [p.read_text() for p in kernels.glob("*.cpp")]
    names = {m[1] for text in tables if (m := re.search(r'KernelTable table = \{"(\w+)"', text))}
    assert names == set(env.KERNELS.choices)
    assert all(name in env.KERNELS.help for name in names)


def test_values() -> None:
    variable = Variable("X", "help", choices=("1", "2"))
    assert variable.text({}) is None
    assert variable.text({"X": " "}) is None
    assert variable.text({"X": " 2 "}) == "2"
    assert variable.number({"X": "2"}) == 2
    assert env.NUM_THREADS.most == 1024  # as num_threads
    with pytest.raises(ConfigError, match="X=3: must be one of 1, 2"):
        variable.text({"X": "3"})


@pytest.mark.parametrize("text", ["0", "-1", "1.5", "two", "\uff12", "1025", "9" * 5000])
def test_numbers_are_whole_and_positive(text: str) -> None:
    with pytest.raises(ConfigError, match="X="):
        Variable("X", "help", most=1024).number({"X": text})


@pytest.mark.parametrize(
    ("text", "on"), [("1", True), ("True", True), ("0", False), ("", False), ("no", False)]
)
def test_switches(text: str, on: bool) -> None:
    assert Variable("X", "help").on({"X": text}) is on


def bare(monkeypatch: pytest.MonkeyPatch) -> logging.Logger:
    """The project's logger as in a program that set up nothing, without pytest's handlers."""
    logger = get_logger()
    monkeypatch.setattr(logger, "handlers", [])
    monkeypatch.setattr(logger, "propagate", False)
    monkeypatch.setattr(logger, "level", logging.NOTSET)
    return logger


def test_request_level_lies_between_info_and_debug(monkeypatch: pytest.MonkeyPatch) -> None:
    logger, stderr = bare(monkeypatch), io.StringIO()
    monkeypatch.setattr(sys, "stderr", stderr)
    set_up("REQUEST")
    set_up("request")
    logger.log(REQUEST, "a prompt")
    logger.debug("a detail")
    text = stderr.getvalue()
    assert text.endswith("REQUEST a prompt\n")
    assert text.count("\n") == 1


def test_a_program_with_its_own_logging_keeps_it(monkeypatch: pytest.MonkeyPatch) -> None:
    logger, own = bare(monkeypatch), logging.NullHandler()
    logger.addHandler(own)
    set_up("INFO")
    assert logger.handlers == [own]
    assert logger.level == logging.INFO


def test_unknown_level() -> None:
    with pytest.raises(ConfigError, match="LOUD: must be one of CRITICAL"):
        set_up("LOUD")
