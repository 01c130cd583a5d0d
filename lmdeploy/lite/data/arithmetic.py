"""Arithmetic by rule from a seed: sums, chains and small word problems, in English and some in Chinese.

Every answer is right. Whether an item is for calibration or held out follows from the item alone, so that the
two never share one.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable, Iterator

Item = tuple[str, str]
"""Question and worked answer."""

_NAMES = ("Tom", "Maria", "Wei", "Aisha", "Ivan", "Lena", "Omar", "Grace")
_THINGS = ("apples", "pens", "books", "stamps", "marbles", "tickets", "eggs", "coins")
_THINGS_CHINESE = ("个苹果", "支笔", "本书", "枚邮票", "张票")
_HELD_OUT_SHARE = 4  # one item of so many


def items(seed: int, held_out: bool) -> Iterator[Item]:
    """Without end; the same for the same seed on every version of Python."""
    draw = _Draw(seed)
    while True:
        item = draw.pick(_KINDS)(draw)
        if (zlib.crc32(item[0].encode()) % _HELD_OUT_SHARE == 0) == held_out:
            yield item


class _Draw:
    """Only `random.random`, whose values Python promises to keep."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def between(self, low: int, high: int) -> int:
        return low + int(self._random.random() * (high - low + 1))

    def pick(self, choices: tuple[Callable[[_Draw], Item], ...]) -> Callable[[_Draw], Item]:
        return choices[self.between(0, len(choices) - 1)]

    def word(self, words: tuple[str, ...]) -> str:
        return words[self.between(0, len(words) - 1)]


def _sum(draw: _Draw) -> Item:
    a, b = draw.between(12, 9999), draw.between(12, 9999)
    if draw.between(0, 1):
        return f"What is {a} + {b}?", f"{a} + {b} = {a + b}"
    a, b = max(a, b), min(a, b)
    return f"What is {a} - {b}?", f"{a} - {b} = {a - b}"


def _product(draw: _Draw) -> Item:
    a, b = draw.between(11, 99), draw.between(3, 99)
    tens, ones = b // 10 * 10, b % 10
    if not tens or not ones:
        return f"What is {a} × {b}?", f"{a} × {b} = {a * b}"
    steps = f"{a} × {tens} = {a * tens} and {a} × {ones} = {a * ones}"
    return f"What is {a} × {b}?", f"{steps}, so {a} × {b} = {a * tens} + {a * ones} = {a * b}"


def _quotient(draw: _Draw) -> Item:
    b, answer, rest = draw.between(3, 19), draw.between(4, 150), draw.between(0, 2)
    a = b * answer + rest
    tail = f" remainder {rest}" if rest else ""
    return f"Divide {a} by {b}.", f"{b} × {answer} = {b * answer}, so {a} ÷ {b} = {answer}{tail}"


def _chain(draw: _Draw) -> Item:
    value = draw.between(5, 60)
    asked, steps = [f"Start with {value}."], list[str]()
    for _ in range(draw.between(3, 5)):
        by, kind = draw.between(2, 40), draw.between(0, 2)
        if kind == 0:
            asked.append(f"Add {by}.")
            steps.append(f"{value} + {by} = {value + by}")
            value += by
        elif kind == 1 and value > by:
            asked.append(f"Subtract {by}.")
            steps.append(f"{value} - {by} = {value - by}")
            value -= by
        else:
            by = 2 + by % 3
            asked.append(f"Multiply by {by}.")
            steps.append(f"{value} × {by} = {value * by}")
            value *= by
    return " ".join(asked) + " What is the result?", ". ".join(steps) + f". The result is {value}."


def _story(draw: _Draw) -> Item:
    name, thing = draw.word(_NAMES), draw.word(_THINGS)
    boxes, each = draw.between(3, 25), draw.between(4, 30)
    away = draw.between(1, boxes * each - 1)
    have = boxes * each
    question = (
        f"{name} has {boxes} boxes with {each} {thing} each and gives {away} {thing} away. How many are left?"
    )
    return (
        question,
        f"{boxes} × {each} = {have}. {have} - {away} = {have - away}. {name} has {have - away} {thing} left.",
    )


def _story_chinese(draw: _Draw) -> Item:
    thing, boxes, each = draw.word(_THINGS_CHINESE), draw.between(3, 25), draw.between(4, 30)
    more, have = draw.between(5, 90), boxes * each
    question = f"每箱有{each}{thing}，一共{boxes}箱，又买来{more}{thing}，现在有多少{thing}？"
    return (
        question,
        f"{boxes} × {each} = {have}，{have} + {more} = {have + more}，现在有{have + more}{thing}。",
    )


_KINDS = (_sum, _product, _quotient, _chain, _chain, _story, _story_chinese)
