"""Whether the fields of a configuration have values that their declarations allow, and in which words not.

Knows the rules a declaration may give (`config._field`, `config._fixed`) and no configuration.
"""

from __future__ import annotations

import dataclasses
import math
import numbers
import sys
from collections.abc import Iterable, Mapping
from typing import Any

from lmdeploy.errors import LMDeployError, text_problem

MOST = 2**63 - 1  # of counts and ids; more has no meaning, and messages could not even show it


def check_fields(config: Any, error: type[LMDeployError]) -> None:
    """Raise `error` for the first field whose value its declaration does not allow.

    Afterwards numbers are Python's own, whatever their type was (numpy's are accepted), and lists are lists.
    """
    for field in dataclasses.fields(config):
        value, rules = getattr(config, field.name), field.metadata
        if value is None and (field.default is None or rules.get("optional", False)):
            continue
        kind = rules.get("kind")
        if kind in ("words", "ids") and _is_list(value):
            value = list(value)
        problem = _problem(value, rules)
        if problem:
            raise error(f"{field.name}={_short(value)}: {problem}", param=field.name)
        object.__setattr__(config, field.name, _plain(value, kind))


def _plain(value: Any, kind: Any) -> Any:
    if kind in (int, float):
        return kind(value)
    if kind == "ids":
        return [int(x) for x in value]
    if kind == "bias":
        return {int(key): _as_float(x) for key, x in value.items()}
    return value


def _as_float(value: Any) -> float:
    """Whole numbers may be larger than any float."""
    try:
        return float(value)
    except OverflowError:
        return sys.float_info.max if value > 0 else -sys.float_info.max


def _problem(value: Any, rules: Mapping[str, Any]) -> str | None:
    if "neutral" in rules:
        return _neutral_problem(value, rules)
    if "choices" in rules:
        choices = rules["choices"]
        same = any(_same_kind(value, c) and value == c for c in choices)
        hint = f"; {rules['hint']}" if "hint" in rules else ""
        return None if same else f"must be one of {', '.join(map(str, choices))}{hint}"
    kind = rules["kind"]
    if kind in (int, float):
        return _number_problem(value, kind, rules)
    if isinstance(kind, type):
        if not isinstance(value, kind):
            return f"must be of type {kind.__name__}"
        return text_problem(value) if isinstance(value, str) and not rules.get("path") else None
    return {"words": _words_problem, "ids": _ids_problem, "bias": _bias_problem}[kind](value)


def _same_kind(value: Any, choice: Any) -> bool:
    return _is_number(value, int) if isinstance(choice, int) else type(value) is type(choice)


def _neutral_problem(value: Any, rules: Mapping[str, Any]) -> str | None:
    neutral = rules["neutral"]
    if any(value == n and isinstance(value, bool) == isinstance(n, bool) for n in neutral):
        return None
    return f"not supported, {rules['reason']}; leave it at {neutral[0]!r}"


def _number_problem(value: Any, kind: type, rules: Mapping[str, Any]) -> str | None:
    low, high = rules.get("low"), rules.get("high")
    if not _is_number(value, kind):
        return "must be a whole number" if kind is int else "must be a number"
    below = low is not None and (value < low or (rules.get("open_low") and value == low))
    above = high is not None and (value > high or (rules.get("open_high") and value == high))
    return f"must be {_range_text(rules)}" if below or above else None


def _range_text(rules: Mapping[str, Any]) -> str:
    low, high = rules.get("low"), rules.get("high")
    above = None if low is None else f"{'larger than' if rules.get('open_low') else 'at least'} {low}"
    below = None if high is None else f"{'less than' if rules.get('open_high') else 'at most'} {high}"
    return " and ".join(x for x in (above, below) if x)


def _is_number(value: Any, kind: type) -> bool:
    """A whole or a finite number, of Python or numpy; True and False are none."""
    if isinstance(value, bool):
        return False
    if isinstance(value, numbers.Integral):
        return True
    return kind is float and isinstance(value, numbers.Real) and math.isfinite(value)


def _words_problem(value: Any) -> str | None:
    if not _is_list(value) or not all(isinstance(x, str) and x for x in value):
        return "must be a list of texts that are not empty"
    return next(filter(None, map(text_problem, value)), None)


def _ids_problem(value: Any) -> str | None:
    good = _is_list(value) and all(_is_number(x, int) and 0 <= x <= MOST for x in value)
    return None if good else "must be a list of token ids"


def _bias_problem(value: Any) -> str | None:
    good = isinstance(value, Mapping) and all(
        _is_number(k, int) and 0 <= k <= MOST and _is_bias(v) for k, v in value.items()
    )
    return None if good else "must map token ids to numbers"


def _is_bias(value: Any) -> bool:
    return _is_number(value, float) or value == -math.inf


def _is_list(value: Any) -> bool:
    return isinstance(value, Iterable) and not isinstance(value, (str, bytes, Mapping))


def _short(value: Any, limit: int = 200) -> str:
    try:
        text = repr(value)
    except ValueError:  # Python does not write out whole numbers of thousands of digits
        text = "a number of thousands of digits"
    return text if len(text) <= limit else text[:limit] + "..."
