"""Rules for answers: JSON, code, arithmetic chains, wording; the built-in questions; files of questions."""

from __future__ import annotations

import ast
import json
from collections import Counter
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmdeploy.errors import ConfigError
from lmdeploy.quality.items import GROUPS, built_in_items, read_items
from lmdeploy.quality.json_check import check_schema, differences, json_problem
from lmdeploy.quality.scoring import broken_steps, check_rules, score

values = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 5) | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)


def described(value: Any) -> dict[str, Any]:
    """A schema that this value alone has by shape."""
    if isinstance(value, dict):
        return {
            "type": "object",
            "required": list(value),
            "properties": {k: described(v) for k, v in value.items()},
            "additionalProperties": False,
        }
    if isinstance(value, list):
        return {"type": "array", "minItems": len(value), "maxItems": len(value)}
    return {"const": value}


@given(values, st.sampled_from(["{}", "```json\n{}\n```", "```\n{}```", "\n {} \n"]))
def test_json_in_every_dress_is_found(value: Any, dress: str) -> None:
    text = dress.replace("{}", json.dumps(value))
    schema = described(value)
    check_schema(schema)
    assert json_problem(text, schema) == (True, None)
    assert not json_problem(text[:-4] if "```" in dress else text + "]", {})[0]


@pytest.mark.parametrize(
    "text", ["", "Sure: {}", '{"a": 1,}', "{'a': 1}", "NaN", "[1] [2]", "[" * 100_000, '{"a": Infinity}']
)
def test_what_is_no_json(text: str) -> None:
    assert score(text, {"json": {}}).invalid_json is True
    assert score(text, {"json": {}}).passed is False


@pytest.mark.parametrize(
    ("value", "schema"),
    [
        (True, {"type": "integer"}),
        (1, {"type": "boolean"}),
        (True, {"const": 1}),
        (1.5, {"type": "integer"}),
        ("x", {"type": ["integer", "null"]}),
        ({}, {"required": ["a"]}),
        ({"a": 1, "b": 2}, {"properties": {"a": {}}, "additionalProperties": False}),
        ({"a": "x"}, {"additionalProperties": {"type": "integer"}}),
        ([1, "x"], {"items": {"type": "integer"}}),
        ([1], {"minItems": 2}),
        ("abc", {"maxLength": 2}),
        ("abc", {"pattern": "^b"}),
        (3, {"maximum": 2}),
        ("a", {"enum": ["b", 1]}),
    ],
)
def test_schema_differences_are_found(value: Any, schema: dict[str, Any]) -> None:
    check_schema(schema)
    assert list(differences(value, schema))


def test_a_whole_float_is_an_integer() -> None:
    assert not list(differences(2.0, {"type": "integer"}))


@pytest.mark.parametrize(
    ("text", "invalid", "passed"),
    [
        ("def add(a, b):\n    return a + b", False, True),
        ("Here:\n```python\ndef add(a, b):\n    return a + b\n```\nIt adds.", False, True),
        ("```python\ndef add(a, b):\n    return a + b", False, True),  # cut off behind the code
        ("```python\ndef add(a):\n    return a\n```", False, False),
        ("def sum_up(a, b):\n    return a + b", False, False),
        ("def add(a, b):\n    print(a + b)", False, False),
        ("def add(a, b)\n    return a + b", True, False),
        ("Here is the function you asked for", True, False),
        ("", True, False),
        ("def add(a, b):\n    return '\x00'", True, False),
        ("(" * 5000, True, False),
    ],
)
def test_code_is_parsed(text: str, invalid: bool, passed: bool) -> None:
    found = score(text, {"code": {"function": "add", "parameters": 2}})
    assert (found.invalid_code, found.passed) == (invalid, passed)


numbers = st.integers(0, 200)


@given(numbers, numbers, st.sampled_from("+-*"), st.integers(-3, 3))
def test_a_wrong_equation_breaks_a_chain(a: int, b: int, sign: str, by: int) -> None:
    right = int(eval(f"{a} {sign} {b}"))
    answer = f"First, {a} {sign} {b} = {right + by}. So it is {right}"
    assert broken_steps(answer) == (by != 0)
    assert score(answer, {"chain": right}).broken_chain is (by != 0)
    assert score(answer + "1", {"chain": right}).broken_chain is True


@pytest.mark.parametrize(
    ("answer", "broken"),
    [
        ("12 + 7 = 19, then 19 × 2 = 38.", 0),
        ("2 + 3 * 4 = 14", 0),
        ("2 + 3 * 4 = 20", 1),
        ("10 / 3 = 3.33", 0),
        ("10 / 3 = 3.3", 0),
        ("10 / 3 = 3.5", 1),
        ("10 ÷ 4 = 2.5 and 1,000 + 500 = 1,500", 0),
        ("5 / 0 = 0", 1),
        ("x = 5 and y = 7", 0),
        ("7 - 9 = -2", 0),
        ("007 + 1 = 8", 0),
    ],
)
def test_equations(answer: str, broken: int) -> None:
    assert broken_steps(answer) == broken


@pytest.mark.parametrize(
    ("check", "good", "bad"),
    [
        ({"contains": ["Au"]}, "It is Au.", "It is an automobile."),
        ({"contains": ["北京"]}, "中国的首都是北京。", "上海"),
        ({"contains_all": ["river", "boat"]}, "A boat on the River.", "a riverboat"),
        ({"excludes": "no"}, "nothing", "No!"),
        ({"equals": ["yes"]}, " Yes.\n", "Yes, it is"),
        ({"regex": "^a+$"}, "aaa", "ab"),
        ({"number": 15}, "12 + 3 is 15.", "15 apples and 2 pears"),
        ({"number": 1500}, "about 1,500", "1,50"),
        ({"words": 3}, "one two-fold three", "one two"),
        ({"max_words": 2}, "a cat", ""),
        ({"lines": 2}, "a\n\nb\n", "a b"),
        ({"bullets": 2}, "- a\n- b", "- a\n-b"),
        ({"numbered": 2}, "1. a\n2) b", "1 a"),
        ({"upper": True}, "THE SEA.", "The SEA"),
        ({"lower": True}, "hello", ""),
        ({"starts": "Certainly"}, " Certainly, so", "Sure"),
        ({"ends": "DONE"}, "it is. DONE ", "DONE."),
        ({"without": ","}, "a dog", "a, dog"),
        ({"language": "zh"}, "春天来了，花都开了 (spring)。", "Spring has come"),
        ({"language": "en"}, "Spring", "春天"),
    ],
)
def test_rules(check: dict[str, Any], good: str, bad: str) -> None:
    check_rules(check, "check")
    assert score(good, check).passed is True
    found = score(bad, check)
    assert found.passed is False and found.reason


def test_without_rules_nothing_is_right_or_wrong() -> None:
    assert score("anything", {}).passed is None


@given(st.text(max_size=80))
def test_any_answer_can_be_scored(answer: str) -> None:
    for check in ({"json": {}}, {"code": {"function": "f"}}, {"chain": 3}, {"language": "zh", "words": 2}):
        score(answer, check)


def test_the_built_in_questions() -> None:
    items = built_in_items()
    assert Counter(item.group for item in items) == dict.fromkeys(GROUPS, 16)
    assert len({item.id for item in items}) == 96
    for item in items:
        check_rules(item.check, item.id)
        assert item.check and item.turns and 16 <= item.max_tokens <= 256
        assert (len(item.turns) > 1) == (item.group == "multi-turn")
        assert ("json" in item.check) == (item.group == "json")
        assert ("code" in item.check) == (item.group == "code")
        assert ("chain" in item.check) == (item.group == "arithmetic")
        assert score("", item.check).passed is False


def test_arithmetic_questions_have_the_right_answers() -> None:
    """Solved once more, by an expression for each."""
    worked = (
        "12-5+8; 3*6-4; (7+9)*2; 20-8+5; 15*4+10; (100-30)/7; 50-5*8; (24-6)/6; (4*6-4)/5; 9*7-13; 5*8-12;"
        " 36/4*2; (50+25+25)/2; 60*3+20; (11+4)*3; 18-3+10"
    )
    expected = [Fraction(eval(one)) for one in worked.split(";")]
    found = [Fraction(item.check["chain"]) for item in built_in_items() if item.group == "arithmetic"]
    assert found == expected


def line(**fields: Any) -> str:
    return json.dumps(fields, ensure_ascii=False)


def test_a_file_of_questions(tmp_path: Path) -> None:
    file = tmp_path / "q.jsonl"
    messages = [
        {"role": "system", "content": "Be short."},
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "c"},
    ]
    lines = [
        line(prompt="Capital of Italy?", expected="Rome"),
        "",
        line(messages=messages, json_schema={"type": "object"}, max_tokens=7, group="mine", id="x"),
        line(prompt="Say a\u2028b", regex="^a", check={"max_words": 3}),
    ]
    file.write_text("\ufeff" + "\n".join(lines), encoding="utf-8")
    first, second, third = read_items(str(file))
    assert (first.turns, dict(first.check), first.id) == (
        ("Capital of Italy?",),
        {"contains": "Rome"},
        "line 1",
    )
    assert (second.turns, list(second.before), second.group) == (("c",), messages[:-1], "mine")
    assert second.max_tokens == 7 and second.check == {"json": {"type": "object"}}
    assert third.check == {"max_words": 3, "regex": "^a"} and third.turns == ("Say a\u2028b",)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "holds no question"),
        ("{", "line 1: no JSON"),
        ("[1]", "an object is expected"),
        (line(prompt="a", extra=1), "no field 'extra'"),
        (line(), "one of prompt and messages"),
        (line(prompt="a", messages=[]), "one of prompt and messages"),
        (line(messages=[]), "not empty"),
        (line(prompt=3), "content (text)"),
        (line(messages=[{"role": "assistant", "content": "x"}]), "must be the user's"),
        (line(prompt="a", max_tokens=0), "max_tokens"),
        (line(prompt="a", max_tokens=True), "max_tokens"),
        (line(prompt="a", regex="("), "no regular expression"),
        (line(prompt="a", expected=[1]), "must be texts"),
        (line(prompt="a", json_schema={"uniqueItems": True}), "'uniqueItems' is not supported"),
        (line(prompt="a", json_schema=[]), "json must be dict"),
        (line(prompt="a", check={"near": 1}), "no rule 'near'"),
        (line(prompt="a", check={"words": "3"}), "words must be int"),
        (line(prompt="a", check={"code": {}}), "function"),
        ('{"prompt": "\\ud800"}', "surrogate"),
    ],
)
def test_a_wrong_file_is_refused(tmp_path: Path, text: str, said: str) -> None:
    file = tmp_path / "q.jsonl"
    file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        read_items(str(file))
    assert said in caught.value.message and "\n" not in caught.value.message


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        read_items(str(tmp_path / "none.jsonl"))
    (tmp_path / "bytes.jsonl").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="no UTF-8"):
        read_items(str(tmp_path / "bytes.jsonl"))


def test_the_code_of_rules_runs_no_answer() -> None:
    """Parsed only: nothing here executes or evaluates a text."""
    import lmdeploy.quality.scoring as module

    tree = ast.parse(Path(module.__file__).read_text(encoding="utf-8"))
    called = {ast.unparse(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
    assert not called & {"eval", "exec", "compile", "ast.literal_eval"}
