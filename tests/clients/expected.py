"""What the recordings say, and the tools and schemas that go with them."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel

MODEL, KEY = "scripted", "sk-scripted"
HELLO = "Hello, wörld 👩‍👩‍👧! Then more."
WEATHER: dict[str, Any] = {
    "name": "get_weather",
    "description": "The weather of a city.",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string"}},
        "required": ["city"],
        "additionalProperties": False,
    },
}
ASK_ONE, ASK_TWO = "What is the weather in Paris?", "What is the weather in Paris and Rome?"
TOLD_ONE, TOLD_TWO = "It is sunny in Paris, with 18 degrees.", "Paris has 18 degrees, Rome has 25."
ASK_SUM, THOUGHT, SUM = "What is two and two?", "Two and two are four.", "Four."
ASK_ADA = "Who is Ada?"


class Person(BaseModel):
    name: str
    age: int


ADA = Person(name="Ada", age=36)


def user(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]
