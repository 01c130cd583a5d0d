"""Some seventy public chat templates: the same text as transformers, or the same refusal."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import pytest
from public_files import vocabularies
from transformers import AutoTokenizer
from transformers.utils.chat_template_utils import render_jinja_template

from lmdeploy.errors import RequestError
from lmdeploy.text.chat_template import ChatTemplate
from lmdeploy.text.tokenizer import Tokenizer, load_tokenizer

Message = dict[str, Any]


def user(content: Any) -> Message:
    return {"role": "user", "content": content}


def assistant(content: Any, **more: Any) -> Message:
    return {"role": "assistant", "content": content, **more}


def call(number: int, **arguments: Any) -> Message:
    return {
        "id": f"abcdef12{number}",
        "type": "function",
        "function": {"name": "weather", "arguments": arguments},
    }


def result(number: int, content: str) -> Message:
    return {"role": "tool", "tool_call_id": f"abcdef12{number}", "name": "weather", "content": content}


SYSTEM = {"role": "system", "content": "Be  brief.\n"}
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": 'Weather <in> a city\'s "area"',
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "description": "Größe"},
                "days": {"type": "integer", "enum": [1, 2]},
            },
            "required": ["city"],
        },
    },
}
# Two templates want more than messages, or tools of another shape than the usual one.
FLAT_TOOL = {
    "name": "weather",
    "description": "Weather",
    "parameters": {"properties": {}},
    "parameter_definitions": {"city": {"type": "str", "description": "Größe", "required": True}},
}
VARIABLES = {"functions": '[{"name": "weather"}]', "datetime": "2026-11-30"}
CALLED = [
    user("Weather?"),
    assistant("", tool_calls=[call(0, city="Köln", days=2)]),
    result(0, '{"rain": 1}'),
]
CONVERSATIONS: dict[str, list[Message]] = {
    "one": [user("What is 2+2?\n Think. ")],
    "system": [SYSTEM, user("Hi")],
    "turns": [SYSTEM, user("Hi"), assistant(" Hello. "), user("漢字 👩‍👩‍👧 <|im_end|> </s> {{ x }}?")],
    "parts": [user([{"type": "text", "text": "one"}, {"type": "text", "text": "two"}])],
    "answer last": [user("Hi"), assistant("Hello")],
    "nothing": [],
    "two in a row": [user("a"), user("b")],
    "reasoning": [user("a"), assistant("<think>\nhm\n</think>\n\nfour", reasoning_content="hm"), user("b")],
    "tool answer": [*CALLED, assistant("Rain."), user("Thanks")],
    "two calls": [
        user("Weather?"),
        assistant(None, tool_calls=[call(0, city="Köln"), call(1, city="Bonn")]),
        result(0, "1"),
        result(1, "2"),
    ],
}


@lru_cache(maxsize=4)
def tokenizer(name: str) -> Tokenizer:
    return load_tokenizer(vocabularies() / f"ggml-vocab-{name}.gguf")


def names() -> list[str]:
    return sorted(path.stem for path in (vocabularies() / "templates").glob("*.jinja"))


def rendered(render: Any, *refusals: type[Exception]) -> tuple[str | None, str]:
    """(text, "") or (None, why it was refused)."""
    try:
        return render(), ""
    except refusals as error:
        return None, " ".join(str(error).split())


def test_the_public_templates_are_there() -> None:
    assert len(names()) >= 70


@pytest.mark.parametrize("vocabulary", ["llama-spm", "qwen2"])
@pytest.mark.parametrize("number", range(70))
def test_text_equals_transformers(number: int, vocabulary: str) -> None:
    """With <|im_end|> or </s> of the user being the text of a control token, and not."""
    name, known = names()[number], tokenizer(vocabulary)
    text = (vocabularies() / "templates" / f"{name}.jinja").read_text(encoding="utf-8")
    ours = ChatTemplate({"default": text}, known, name)
    common = {**VARIABLES, "strftime_now": lambda form: "2026-11-30"}  # both would read the clock
    answered = 0
    for case, messages in CONVERSATIONS.items():
        for tools in (None, [TOOL], [FLAT_TOOL]):
            for prompt in (True, False):
                expected, reason = rendered(
                    lambda m=messages, t=tools, p=prompt: render_jinja_template(
                        [m],
                        tools=t,
                        chat_template=text,
                        add_generation_prompt=p,
                        **common,
                        **known.named_tokens,
                    )[0][0],
                    Exception,
                )
                found, why = rendered(
                    lambda m=messages, t=tools, p=prompt: ours.render(m, t, p, **common), RequestError
                )
                assert found == expected, f"{name}: {case}, tools {bool(tools)}, prompt {prompt}"
                assert reason in why, f"{name}: {case}"
                answered += expected is not None
    assert answered >= 4, f"{name}: refuses nearly everything, so nothing was compared"


@pytest.mark.parametrize("number", range(70))
def test_continued_answers_equal_transformers(number: int) -> None:
    name, known = names()[number], tokenizer("llama-spm")
    text = (vocabularies() / "templates" / f"{name}.jinja").read_text(encoding="utf-8")
    common = {**VARIABLES, "strftime_now": lambda form: "2026-11-30", "continue_final_message": True}
    ours = ChatTemplate({"default": text}, known, name)
    for content in ("The answer", "It ends in blanks  ", " It begins with one\n"):
        messages = [user("Hi"), assistant(content)]
        expected, _ = rendered(
            lambda m=messages: render_jinja_template([m], chat_template=text, **common, **known.named_tokens)[
                0
            ][0],
            Exception,
        )
        found, _ = rendered(lambda m=messages: ours.render(m, **common), RequestError)
        assert found == expected, f"{name}: {content!r}"


@pytest.mark.parametrize(
    ("vocabulary", "name"),
    [
        ("qwen2", "Qwen-Qwen2.5-7B-Instruct"),
        ("qwen2", "Qwen-Qwen3-0.6B"),
        ("llama-bpe", "meta-llama-Llama-3.2-3B-Instruct"),
        ("phi-3", "microsoft-Phi-3.5-mini-instruct"),
    ],
)
def test_prompt_ids_equal_transformers(vocabulary: str, name: str) -> None:
    """With transformers reading the same vocabulary from the same GGUF file."""
    text = (vocabularies() / "templates" / f"{name}.jinja").read_text(encoding="utf-8")
    theirs = AutoTokenizer.from_pretrained(str(vocabularies()), gguf_file=f"ggml-vocab-{vocabulary}.gguf")
    ours = ChatTemplate({"default": text}, tokenizer(vocabulary), name)
    common = {"strftime_now": lambda form: "30 Nov 2026"}
    asked = [
        SYSTEM,
        user("What is 2+2? Isn't it 12345?\nfoo  bar"),
        assistant("It's four."),
        user("漢字 👩‍👩‍👧 naïve"),
    ]
    for messages in (asked[1:2], asked):
        expected = theirs.apply_chat_template(
            messages, chat_template=text, return_dict=False, add_generation_prompt=True, **common
        )
        assert ours.encode(messages, **common) == list(expected)
