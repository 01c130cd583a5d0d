"""Rules that score an answer without another model.

A rule set is a dictionary, as items keep it under `check`; an answer passes when every rule holds. Code is
parsed, never run.
"""

from __future__ import annotations

import ast
import re
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from lmdeploy.errors import ConfigError
from lmdeploy.quality.json_check import check_schema, fenced, json_problem

Check = Mapping[str, Any]
_NUMBER = re.compile(r"-?\d+(?:,\d{3})*(?:\.\d+)?(?:/\d+)?")
_STEP = re.compile(
    r"(?P<left>-?\d[\d,.]*(?:\s*[-+*/x×÷]\s*-?\d[\d,.]*)+)\s*=\s*(?P<right>-?\d+(?:,\d{3})*(?:\.\d+)?)"
)
_WORD = re.compile(r"[^\W_]+(?:['’-][^\W_]+)*")


@dataclass(frozen=True, slots=True)
class Score:
    """passed: None where no rule was given. reason: the first rule that does not hold. invalid_json,
    invalid_code, broken_chain: None where that was not asked for."""

    passed: bool | None
    reason: str = ""
    invalid_json: bool | None = None
    invalid_code: bool | None = None
    broken_chain: bool | None = None


def score(answer: str, check: Check) -> Score:
    """Of one answer."""
    problems = [f"{name}: {problem}" for name, problem in _problems(answer, check) if problem]
    found: dict[str, bool] = {}
    if "json" in check:
        found["invalid_json"] = not json_problem(answer, check["json"])[0]
    if "code" in check:
        found["invalid_code"] = _parsed(answer) is None
    if "chain" in check:
        found["broken_chain"] = broken_steps(answer) > 0 or _last_number(answer) != _value(check["chain"])
    return Score(None if not check else not problems, problems[0] if problems else "", **found)


def check_rules(check: Any, where: str) -> None:
    """ConfigError when a rule is unknown or has a value it cannot have."""
    if not isinstance(check, dict):
        raise ConfigError(f"{where} must be an object of rules")
    for name, value in check.items():
        if name not in _RULES:
            raise ConfigError(f"{where}: there is no rule {name!r} (there are: {', '.join(_RULES)})")
        kinds = _KINDS[name]
        if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
            raise ConfigError(f"{where}: {name} must be {' or '.join(k.__name__ for k in kinds)}")
    for one in _listed(check.get("regex", [])):
        try:
            re.compile(one)
        except (re.error, TypeError) as error:
            raise ConfigError(f"{where}: regex {one!r} is no regular expression: {error}") from None
    if "json" in check:
        check_schema(check["json"], f"{where}.json")
    if "code" in check:
        _check_code(check["code"], where)


def _check_code(wanted: Mapping[str, Any], where: str) -> None:
    kinds = {"function": str, "parameters": int, "returns": bool}
    good = all(isinstance(value, kinds.get(name, ())) for name, value in wanted.items())
    if not good or "function" not in wanted:
        raise ConfigError(
            f"{where}: code has function (a name), perhaps parameters (how many) and returns (true, false)"
        )


def broken_steps(answer: str) -> int:
    """Equations such as `12 + 7 = 20` in the answer that are not true; one operator at a time, or several by
    the rules of arithmetic."""
    return sum(not _holds(found["left"], found["right"]) for found in _STEP.finditer(answer))


def _holds(left: str, right: str) -> bool:
    text = re.sub(r"[x×]", "*", left.replace(",", "").replace("÷", "/"))
    # A zero before a digit is no number in Python; a full stop at the end is that of a sentence.
    text = re.sub(r"\b0+(?=\d)", "", text).rstrip(". ")
    try:
        value = _arithmetic(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError):
        return False
    target = _value(right)
    digits = len(right.partition(".")[2])
    return target is not None and abs(value - target) * 2 <= (Fraction(1, 10**digits) if digits else 0)


def _arithmetic(node: ast.expr) -> Fraction:
    if isinstance(node, ast.Constant) and isinstance(node.value, int | float):
        return Fraction(str(node.value))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_arithmetic(node.operand)
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        return _OPERATORS[type(node.op)](_arithmetic(node.left), _arithmetic(node.right))
    raise ValueError


_OPERATORS: dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: lambda a, b: a + b,
    ast.Sub: lambda a, b: a - b,
    ast.Mult: lambda a, b: a * b,
    ast.Div: lambda a, b: a / b,
}


def _value(text: Any) -> Fraction | None:
    try:
        return Fraction(str(text).replace(",", ""))
    except (ValueError, ZeroDivisionError):
        return None


def _last_number(answer: str) -> Fraction | None:
    found = _NUMBER.findall(answer)
    return _value(found[-1]) if found else None


def _parsed(answer: str) -> ast.Module | None:
    """The Python of the first code fence, or of an answer without one; None when it is none."""
    body = fenced(answer)
    text = answer.partition("```")[2].partition("\n")[2] if body is None and "```" in answer else body
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of odd escapes in what a model wrote
            tree = ast.parse(answer if text is None else text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    return tree if tree.body else None


def _listed(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list) else [value]


def _contains(answer: str, texts: Any) -> str | None:
    return None if any(_has(answer, text) for text in _listed(texts)) else f"none of {texts} is there"


def _contains_all(answer: str, texts: Any) -> str | None:
    missing = [text for text in _listed(texts) if not _has(answer, text)]
    return f"{missing[0]!r} is missing" if missing else None


def _has(answer: str, text: str) -> bool:
    """As a word or words of their own, whatever the case; within a text where words have no gaps."""
    inside = re.escape(text.casefold())
    edge = r"(?<![^\W_]){}(?![^\W_])" if text.isascii() else "{}"
    return re.search(edge.format(inside), answer.casefold()) is not None


def _excludes(answer: str, texts: Any) -> str | None:
    there = [text for text in _listed(texts) if _has(answer, text)]
    return f"{there[0]!r} is there" if there else None


def _regex(answer: str, patterns: Any) -> str | None:
    missing = [p for p in _listed(patterns) if not re.search(p, answer)]
    return f"{missing[0]} is not matched" if missing else None


def _equals(answer: str, texts: Any) -> str | None:
    said = _plain(answer)
    return None if any(said == _plain(text) for text in _listed(texts)) else f"is not {texts}"


def _plain(text: str) -> str:
    return " ".join(text.split()).strip(" .!\"'`*").casefold()


def _number(answer: str, value: Any) -> str | None:
    last = _last_number(answer)
    return None if last is not None and last == _value(value) else f"the last number is not {value}"


def _chain(answer: str, value: Any) -> str | None:
    broken = broken_steps(answer)
    return f"{broken} equations are wrong" if broken else _number(answer, value)


def _json(answer: str, schema: Any) -> str | None:
    return json_problem(answer, schema)[1]


def _code(answer: str, wanted: Any) -> str | None:
    """wanted: name of a function, its number of parameters, whether it must return something."""
    tree = _parsed(answer)
    if tree is None:
        return "is no Python"
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == wanted["function"]:
            arguments = node.args.posonlyargs + node.args.args
            if len(arguments) != wanted.get("parameters", len(arguments)):
                return f"takes {len(arguments)} parameters"
            returns = any(isinstance(n, ast.Return) and n.value is not None for n in ast.walk(node))
            yields = any(isinstance(n, ast.Yield | ast.YieldFrom) for n in ast.walk(node))
            return None if returns or yields or not wanted.get("returns", True) else "returns nothing"
    return f"defines no function {wanted['function']}"


def _words(answer: str) -> int:
    return len(_WORD.findall(answer))


def _lines(answer: str) -> list[str]:
    return [line.strip() for line in answer.strip().splitlines() if line.strip()]


def _count(found: int, wanted: int, of: str) -> str | None:
    return None if found == wanted else f"{found} {of}"


def _most(found: int, wanted: int, of: str) -> str | None:
    return None if 0 < found <= wanted else f"{found} {of}"


_RULES: dict[str, Callable[[str, Any], str | None]] = {
    "contains": _contains,
    "contains_all": _contains_all,
    "excludes": _excludes,
    "equals": _equals,
    "regex": _regex,
    "number": _number,
    "chain": _chain,
    "json": _json,
    "code": _code,
    "words": lambda answer, n: _count(_words(answer), n, "words"),
    "max_words": lambda answer, n: _most(_words(answer), n, "words"),
    "lines": lambda answer, n: _count(len(_lines(answer)), n, "lines"),
    "bullets": lambda answer, n: _count(len(re.findall(r"(?m)^\s*[-*•] \S", answer)), n, "bullets"),
    "numbered": lambda answer, n: _count(len(re.findall(r"(?m)^\s*\d+[.)] \S", answer)), n, "numbered lines"),
    "upper": lambda answer, _: None if answer.strip() and answer == answer.upper() else "not all capitals",
    "lower": lambda answer, _: None if answer.strip() and answer == answer.lower() else "not all lower case",
    "starts": lambda answer, t: None if answer.strip().startswith(t) else "begins otherwise",
    "ends": lambda answer, t: None if answer.strip().endswith(t) else "ends otherwise",
    "without": lambda answer, t: None if answer.strip() and t not in answer else f"holds {t!r}",
    "language": lambda answer, t: _language(answer, t),
}
_TEXTS, _NUMBERS = (str, list), (int, float, str)
_KINDS: dict[str, tuple[type, ...]] = {
    **dict.fromkeys(("contains", "contains_all", "excludes", "equals", "regex"), _TEXTS),
    **dict.fromkeys(("number", "chain"), _NUMBERS),
    **dict.fromkeys(("json", "code"), (dict,)),
    **dict.fromkeys(("words", "max_words", "lines", "bullets", "numbered"), (int,)),
    **dict.fromkeys(("upper", "lower"), (bool,)),
    **dict.fromkeys(("starts", "ends", "without", "language"), (str,)),
}


def _language(answer: str, wanted: str) -> str | None:
    """zh: at least half of the letters are Chinese characters; en: at least nine in ten are ASCII."""
    letters = [c for c in answer if c.isalpha()]
    chinese = sum("\u4e00" <= c <= "\u9fff" for c in letters)
    ascii_letters = sum(c.isascii() for c in letters)
    good = 2 * chinese >= len(letters) if wanted == "zh" else 10 * ascii_letters >= 9 * len(letters)
    return None if letters and good else f"is not in {wanted}"


def _problems(answer: str, check: Check) -> list[tuple[str, str | None]]:
    return [(name, _RULES[name](answer, value)) for name, value in check.items()]
