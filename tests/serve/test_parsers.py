"""Tool calls and reasoning: what models write, read at every cut, comes out the same.

What is read are calls as the models' own public chat templates write them (rendered by transformers), and
outputs shown in public documentation, with their addresses.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from functools import lru_cache
from typing import Any

import pytest
from public_files import vocabularies
from transformers.utils.chat_template_utils import render_jinja_template

from lmdeploy.runtime.generate import Delta
from lmdeploy.serve.parsers.answer import Message, PartStream, collect
from lmdeploy.serve.parsers.base import Part
from lmdeploy.serve.parsers.select import REASONING_FORMATS, TOOL_FORMATS, Parsers, choose, names
from lmdeploy.serve.parsers.tools import ToolSet

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Weather of a city",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string"},
                "days": {"type": "integer"},
                "opts": {"type": "object"},
            },
            "required": ["city"],
        },
    },
}
TOOLS = ToolSet([WEATHER])
FIRST = {"city": 'Kö"ln', "days": 2, "opts": {"a": [1, False], "b": "<x>"}}
SECOND = {"city": "x\ny"}
ENDS = (
    "<|im_end|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<EOS>",
    "<turn|>",
    "<|tool_response>",
    "<|call|>",
    "<｜end▁of▁sentence｜>",
    "<｜Assistant｜>",
    "<seed:eos>",
    "<SPECIAL_12>",
    "<|end_of_text|>",
    "[e~[",
    "<|END_OF_TURN_TOKEN|>",
    "<end_of_sentence>",
    "<|role_end|>",
    "</assistant>",
    "<|end|>",
    "<sep>",
)


def replay(
    parsers: Parsers, pieces: Iterable[str], prompt: str = "", tools: ToolSet | None = TOOLS
) -> Message:
    """The message that these pieces make."""
    stream = PartStream(parsers.parser(tools, prompt))
    said = [stream.feed(Delta(piece)) for piece in pieces]
    return collect([*said, stream.feed(Delta(finish_reason="stop"))])


def summary(message: Message) -> tuple[Any, ...]:
    calls = [(call.name, call.arguments) for call in message.calls]
    assert len({call.id for call in message.calls}) == len(calls)
    return message.text, message.reasoning, calls, message.finish_reason


def every_cut(parsers: Parsers, text: str, prompt: str = "", tools: ToolSet | None = TOOLS) -> Message:
    """The message of `text`, after checking that it is the same for every place of a cut."""
    whole = replay(parsers, [text], prompt, tools)
    assert summary(replay(parsers, text, prompt, tools)) == summary(whole), "character by character"
    for at in range(1, len(text)):
        cut = replay(parsers, [text[:at], text[at:]], prompt, tools)
        assert summary(cut) == summary(whole), f"cut behind {text[:at]!r}"
    return whole


def calls_of(message: Message) -> list[tuple[str, Any]]:
    return [(call.name, json.loads(call.arguments)) for call in message.calls]


@lru_cache
def template(name: str) -> str:
    return (vocabularies() / "templates" / f"{name}.jinja").read_text(encoding="utf-8")


def rendered(name: str, messages: list[dict[str, Any]], prompt: bool) -> str:
    texts, _ = render_jinja_template(
        conversations=[messages],
        tools=[WEATHER],
        chat_template=template(name),
        bos_token="<BOS>",
        eos_token="<EOS>",
        add_generation_prompt=prompt,
    )
    return str(texts[0])


def written(name: str, turn: dict[str, Any], starts: str | None) -> tuple[str, str]:
    """(prompt, answer without its end marker) of an assistant turn, as the model's template writes them."""
    ask = [{"role": "user", "content": "Q?"}]
    prompt = rendered(name, ask, True)
    whole = rendered(name, [*ask, turn], False)
    if starts is not None:
        answer = whole[whole.rindex(starts) + len(starts) :]
    else:
        assert whole.startswith(prompt)
        answer = whole[len(prompt) :]
    answer = answer.rstrip("\n")
    for end in ENDS * 2:
        answer = answer.removesuffix(end).rstrip("\n")
    return prompt, answer


def call(number: int, arguments: dict[str, Any]) -> dict[str, Any]:
    function = {"name": "weather", "arguments": arguments}
    return {"id": f"abcdef12{number}", "type": "function", "function": function}


# Template -> tool format, whether it writes reasoning beside calls, how many calls it can write, where an
# answer starts when that is not right behind the prompt.
TEMPLATES: dict[str, tuple[str, bool, int, str | None]] = {
    "Bielik-11B-v3.0-Instruct": ("hermes", True, 2, "assistant\n"),
    "ByteDance-Seed-OSS": ("seed-oss", True, 2, None),
    "Cohere2MoE": ("command", True, 2, "<|CHATBOT_TOKEN|>"),
    "GLM-4.6": ("glm45", True, 2, None),
    "GLM-4.7-Flash": ("glm45", True, 2, "<|assistant|>"),
    "LFM2.5-8B-A1B": ("pythonic", False, 2, None),
    "MiMo-VL": ("hermes", False, 2, None),
    "MiniMax-M1": ("minimax-m1", False, 2, None),
    "MiniMax-M2": ("minimax-m2", True, 2, None),
    "Mistral-Small-3.2-24B-Instruct-2506": ("mistral", False, 2, None),
    "NVIDIA-Nemotron-3-Nano-30B-A3B-BF16": ("qwen3coder", True, 2, "assistant\n"),
    "NVIDIA-Nemotron-Nano-v2": ("nemotron", False, 2, "Assistant\n"),
    "NousResearch-Hermes-2-Pro-Llama-3-8B-tool_use": ("hermes", False, 2, None),
    "NousResearch-Hermes-3-Llama-3.1-8B-tool_use": ("hermes", False, 2, None),
    "Qwen-QwQ-32B": ("hermes", False, 2, "assistant\n"),
    "Qwen-Qwen2.5-7B-Instruct": ("hermes", False, 2, None),
    "Qwen-Qwen3-0.6B": ("hermes", True, 2, None),
    "Qwen3-Coder": ("qwen3coder", False, 2, None),
    "Qwen3.5-4B": ("qwen3coder", True, 2, "assistant\n"),
    "Reka-Edge": ("hermes", False, 2, "assistant: "),
    "Spark2.5": ("glm45", True, 2, "<|Bot|>"),
    "StepFun3.5-Flash": ("qwen3coder", True, 2, "assistant\n"),
    "deepseek-ai-DeepSeek-R1-Distill-Qwen-32B": ("deepseek-v3", False, 2, "Q?<｜Assistant｜>"),
    "deepseek-ai-DeepSeek-V3.1": ("deepseek-v3", False, 2, "<think></think>"),
    "deepseek-ai-DeepSeek-V3.2": ("deepseek-v32", False, 2, "</think>"),
    "deepseek-ai-DeepSeek-V4": ("deepseek-v4", False, 2, "</think>"),
    "google-gemma-4-31B-it": ("gemma4", True, 2, "<|turn>model\n"),
    "google-gemma-4-31B-it-interleaved": ("gemma4", True, 2, "<|turn>model\n"),
    "ibm-granite-granite-4.0": ("hermes", False, 2, None),
    "inclusionai-ling-3.0-flash": ("glm45", True, 2, "<role>ASSISTANT</role>\n"),
    "meetkai-functionary-medium-v3.1": ("functionary", False, 2, None),
    "meta-llama-Llama-3.1-8B-Instruct": ("llama3", False, 1, None),
    "meta-llama-Llama-3.2-3B-Instruct": ("llama3", False, 1, None),
    "meta-llama-Llama-3.3-70B-Instruct": ("llama3", False, 1, None),
    "mistralai-Ministral-3-14B-Reasoning-2512": ("mistral", False, 2, None),
    "mistralai-Mistral-Nemo-Instruct-2407": ("mistral", False, 2, None),
    "moonshotai-Kimi-K2": ("kimi-k2", False, 2, None),
    "openai-gpt-oss-120b": ("gpt-oss", False, 1, None),
    "poolside-Laguna-S-2.1": ("glm45", True, 2, "<assistant>"),
    "unsloth-Apriel-1.5": ("minimax-m1", False, 2, "\n\n"),
    "unsloth-mistral-Devstral-Small-2507": ("mistral", False, 2, None),
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_calls_as_templates_write_them(name: str) -> None:
    """Two calls with texts, numbers, objects; at every cut the arguments are those that were written."""
    expected, reasons, count, starts = TEMPLATES[name]
    parsers = choose("auto", "auto", {"default": template(name)})
    assert parsers.tool is not None and parsers.tool.names[0] == expected
    calls = [call(0, FIRST), call(1, SECOND)][:count]
    turn: dict[str, Any] = {"role": "assistant", "content": "", "tool_calls": calls}
    if reasons:
        turn["reasoning_content"] = "hm\n\nso"
    prompt, answer = written(name, turn, starts)
    message = every_cut(parsers, answer, prompt if starts is None else "")
    assert calls_of(message) == [("weather", FIRST), ("weather", SECOND)][:count]
    assert (message.text, message.reasoning) == ("", "hm\n\nso" if reasons else "")
    assert message.finish_reason == "tool_calls"


LLAMA4 = "https://www.llama.com/docs/model-cards-and-prompt-formats/llama4_omni"
LLAMA3 = "https://www.llama.com/docs/model-cards-and-prompt-formats/llama3_1"
INTERNLM = "https://github.com/InternLM/InternLM/blob/main/chat/chat_format.md"
HARMONY = "https://cookbook.openai.com/articles/openai-harmony"
GEMMA = "https://ai.google.dev/gemma/docs/functiongemma/formatting-and-best-practices"
GEMMA3 = "https://www.philschmid.de/gemma-function-calling"
QWEN = "https://qwen.readthedocs.io/en/latest/framework/function_call.html"
PHI4 = "https://huggingface.co/microsoft/Phi-4-mini-instruct#function-calling"


def tool(name: str, **properties: str) -> dict[str, Any]:
    kinds = {key: {"type": kind} for key, kind in properties.items()}
    parameters = {"type": "object", "properties": kinds}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


# Where it is shown, format, output, text in front, calls.
DOCUMENTED: list[tuple[str, str, str, str, list[tuple[str, Any]]]] = [
    (
        LLAMA4,
        "llama4",
        "[get_weather(city='San Francisco', metric='celsius'), "
        "get_weather(city='Seattle', metric='celsius')]",
        "",
        [
            ("get_weather", {"city": "San Francisco", "metric": "celsius"}),
            ("get_weather", {"city": "Seattle", "metric": "celsius"}),
        ],
    ),
    (
        LLAMA4,
        "pythonic",
        "<|python_start|>[trending_songs(n=10, genre=None)]<|python_end|>",
        "",
        [("trending_songs", {"n": 10, "genre": None})],
    ),
    (
        LLAMA3,
        "llama3",
        '<|python_tag|>{"type": "function", "name": "trending_songs", '
        '"parameters": {"n": "10", "genre": "all"}}',
        "",
        [("trending_songs", {"n": "10", "genre": "all"})],
    ),
    (
        LLAMA3,
        "llama3_user_defined",
        '<function=spotify_trending_songs>{"n": "5"}</function>',
        "",
        [("spotify_trending_songs", {"n": "5"})],
    ),
    (
        INTERNLM,
        "internlm",
        "I need to call the get_current_weather function.<|action_start|><|plugin|>\n"
        '{"name": "get_current_weather", "parameters": {"location": "Shanghai"}}<|action_end|>\n',
        "I need to call the get_current_weather function.",
        [("get_current_weather", {"location": "Shanghai"})],
    ),
    (
        GEMMA,
        "functiongemma",
        "<start_function_call>call:get_weather{location:<escape>Tokyo, JP<escape>,days:3}<end_function_call>",
        "",
        [("get_weather", {"location": "Tokyo, JP", "days": 3})],
    ),
    (
        GEMMA3,
        "gemma3",
        '```tool_code\nget_weather(city="Paris")\n```',
        "",
        [("get_weather", {"city": "Paris"})],
    ),
    (
        QWEN,
        "qwen3",
        '<tool_call>\n{"name": "get_current_temperature", "arguments": '
        '{"location": "San Francisco, CA, USA"}}\n</tool_call>\n'
        '<tool_call>\n{"name": "get_temperature_date", "arguments": '
        '{"location": "San Francisco, CA, USA", "date": "2024-10-01"}}\n</tool_call>',
        "",
        [
            ("get_current_temperature", {"location": "San Francisco, CA, USA"}),
            ("get_temperature_date", {"location": "San Francisco, CA, USA", "date": "2024-10-01"}),
        ],
    ),
    (
        PHI4,
        "phi4_mini_json",
        '<|tool_call|>[{"name": "get_weather_updates", "arguments": {"city": "Paris"}}]<|/tool_call|>',
        "",
        [("get_weather_updates", {"city": "Paris"})],
    ),
    (
        HARMONY,
        "gpt-oss",
        "<|channel|>analysis<|message|>Need to use function get_current_weather.<|end|><|start|>assistant"
        "<|channel|>commentary to=functions.get_current_weather <|constrain|>json"
        '<|message|>{"location": "Tokyo"}',
        "",
        [("get_current_weather", {"location": "Tokyo"})],
    ),
    (
        HARMONY,
        "openai",
        "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>commentary<|message|>"
        "**Action plan**: 1. Generate an HTML file<|end|>"
        "<|start|>assistant to=functions.generate_file<|channel|>commentary json"
        '<|message|>{"template": "basic_html", "path": "index.html"}<|call|>',
        "**Action plan**: 1. Generate an HTML file",
        [("generate_file", {"template": "basic_html", "path": "index.html"})],
    ),
]


@pytest.mark.parametrize(("source", "name", "output", "text", "calls"), DOCUMENTED)
def test_calls_as_documents_show_them(
    source: str, name: str, output: str, text: str, calls: list[tuple[str, Any]]
) -> None:
    tools = ToolSet([tool(name) for name, _ in calls])
    parsers = choose(name, name if name in names(REASONING_FORMATS) else "none", {})
    message = every_cut(parsers, output, "", tools)
    assert (message.text, calls_of(message)) == (text, calls)
    if source == HARMONY:
        assert message.reasoning


REASONINGS = [
    # K25: the same for each format; https://qwenlm.github.io/blog/qwen3 and the models' templates
    ("think", "<think>\na\n</think>\n\nb", "", "a", "b"),
    ("think", "a\n</think>\n\nb", "<|assistant|><think>\n", "a", "b"),
    ("think", "b", "<think>\n\n</think>\n\n", "", "b"),
    ("think", "<think>\n\n</think>\n\nb", "", "", "b"),
    ("think", "<think>cut off", "", "cut off", ""),
    ("think", "The tag <think> opens, </think> closes.", "", "", "The tag <think> opens, </think> closes."),
    ("deepseek-r1", "a\n</think>\n\nb", "<｜Assistant｜>", "a", "b"),
    ("deepseek-r1", "<think>\na\n</think>\nb", "<｜Assistant｜>", "a", "b"),
    ("deepseek-r1", "b", "<think>\n\n</think>\n\n", "", "b"),
    ("mistral", "[THINK]a\nb[/THINK]c", "", "a\nb", "c"),
    ("seed-oss", "<seed:think>a</seed:think>b", "", "a", "b"),
    ("gemma4", "<|channel>thought\na\n<channel|>b", "", "a", "b"),
    ("command", "<|START_THINKING|>a<|END_THINKING|>b", "", "a", "b"),
    # https://cookbook.openai.com/articles/openai-harmony
    (
        "gpt-oss",
        "<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>final<|message|>b<|return|>",
        "",
        "a",
        "b",
    ),
]


@pytest.mark.parametrize(("name", "output", "prompt", "reasoning", "text"), REASONINGS)
def test_reasoning(name: str, output: str, prompt: str, reasoning: str, text: str) -> None:
    for tool_name in ("none", "hermes"):
        message = every_cut(choose(tool_name, name, {}), output, prompt)
        assert (message.reasoning, message.text, message.calls) == (reasoning, text, [])
        assert message.finish_reason == "stop"


def test_reasoning_may_stay_in_the_text() -> None:
    parsers = choose("hermes", "think", {})
    call = '<tool_call>\n{"name": "weather", "arguments": {}}\n</tool_call>'
    output = f"<think>\nI use <tool_call>.\n</think>\n\n{call}"
    stream = PartStream(parsers.parser(TOOLS, "", separate=False))
    message = collect([stream.feed(Delta(c)) for c in output] + [stream.feed(Delta(finish_reason="stop"))])
    assert message.text == "<think>\nI use <tool_call>.\n</think>"
    assert calls_of(message) == [("weather", {})]
    assert message.reasoning == ""


def test_a_call_ends_reasoning_that_was_left_open() -> None:
    parsers = choose("hermes", "think", {})
    call = '<tool_call>\n{"name": "weather", "arguments": {}}\n</tool_call>'
    message = every_cut(parsers, f"<think>\nI call.\n\n{call}")
    assert (message.reasoning, message.text, calls_of(message)) == ("I call.", "", [("weather", {})])


GOOD = '{"name": "weather", "arguments": {"city": "Rom"}}'
NO_CALLS = [
    ("hermes", "<tool_call> is a tag."),
    ("hermes", "<tool_call>\nnot json\n</tool_call> after "),
    ("hermes", '<tool_call>\n{"name": "weather"'),
    ("hermes", '<tool_call>\n{"name": 5, "arguments": {}}\n</tool_call>'),
    ("hermes", '<tool_call>\n{"name": "weather", "arguments": [1]}\n</tool_call>'),
    ("hermes", '<tool_call>\n{"arguments": {}}\n</tool_call>'),
    ("hermes", "  blanks stay \n\n"),
    ("hermes", "a < b <tool_cal"),
    ("llama3", '{"name": "other", "parameters": {}}'),
    ("llama3", '{"a": 1} is JSON'),
    ("llama3", ' [1, {"x": 2}] and so on'),
    ("pythonic", "[unknown(a=1)]"),
    ("pythonic", "[1, 2] is a list; weather(city='x') is not"),
    ("mistral", "[TOOL_CALLS] is a token"),
    ("mistral", "[TOOL_CALLS][1, 2]"),
    ("internlm", "<|action_start|><|interpreter|>\nprint(1)<|action_end|>"),
    ("deepseek-v3", "<｜tool▁calls▁begin｜>hm<｜tool▁calls▁end｜>"),
    ("qwen3coder", "<tool_call>\nsomething else\n</tool_call>"),
    ("glm45", "<tool_call>two words\n</tool_call>"),
    ("deepseek-v32", "<｜DSML｜function_calls>\n</｜DSML｜function_calls>"),
    ("gemma4", "<|tool_call>call weather<tool_call|>"),
    ("kimi-k2", "<|tool_calls_section_begin|><|tool_calls_section_end|>"),
    ("gpt-oss", "just text"),
]


@pytest.mark.parametrize(("name", "output"), NO_CALLS)
def test_what_only_looks_like_a_call_is_text(name: str, output: str) -> None:
    message = every_cut(choose(name, "none", {}), output)
    assert (message.text, message.calls, message.finish_reason) == (output, [], "stop")


@pytest.mark.parametrize(
    ("name", "output", "arguments"),
    [
        ("hermes", '<tool_call>{"name": "weather", "arguments": {"city": "Ro', '{"city": "Ro'),
        ("hermes", '<tool_call>{"name": "weather", "arguments": {"a": }}</tool_call>', '{"a": }}'),
        ("llama3", '{"name": "weather", "parameters": {"city": "Ro', '{"city": "Ro'),
        ("qwen3coder", "<tool_call>\n<function=weather>\n<parameter=city>\nRo", '{"city": "Ro'),
        ("glm45", "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Ro", '{"city": "Ro'),
        ("mistral", '[TOOL_CALLS]weather[ARGS]{"city": "Ro', '{"city": "Ro'),
        ("pythonic", "[weather(city='Ro", '{"city": \'Ro'),
        ("gpt-oss", '<|channel|>commentary to=functions.weather<|message|>{"city": "Ro', '{"city": "Ro'),
    ],
)
def test_a_call_that_was_cut_off_stays_a_call(name: str, output: str, arguments: str) -> None:
    """It cannot be taken back once it was told, nor is it completed: nobody may run half a call."""
    message = every_cut(choose(name, "none", {}), output)
    assert [(c.name, c.arguments) for c in message.calls] == [("weather", arguments)]


@pytest.mark.parametrize(
    ("output", "arguments"),
    [
        (f"<tool_call>{GOOD}</tool_call>", {"city": "Rom"}),
        ('<tool_call>{"arguments": {"city": "Rom"}, "name": "weather"}</tool_call>', {"city": "Rom"}),
        ('<tool_call>{"name": "weather"}</tool_call>', {}),
        ('<tool_call>{"name": "weather", "arguments": null}</tool_call>', {}),
        ('<tool_call>{"name": "weather", "arguments": "{\\"city\\": 1}"}</tool_call>', {"city": 1}),
        ('<tool_call>{"name": "weather", "arguments": {"city": "a\nb"}}</tool_call>', {"city": "a\nb"}),
        (
            '<tool_call>{"id": [1, {}], "name": "weather", "parameters": {"x": 1.5e3}}</tool_call>',
            {"x": 1500},
        ),
        (f"<tool_call>{GOOD}", {"city": "Rom"}),
    ],
)
def test_forms_of_arguments(output: str, arguments: dict[str, Any]) -> None:
    assert calls_of(every_cut(choose("hermes", "none", {}), output)) == [("weather", arguments)]


def test_text_around_calls() -> None:
    output = f"Let me see.\n\n<tool_call>{GOOD}</tool_call>\n\nDone.\n<tool_call>{GOOD}</tool_call>\n"
    message = every_cut(choose("hermes", "none", {}), output)
    assert (message.text, len(message.calls)) == ("Let me see.\n\nDone.", 2)


def test_parameters_take_the_kind_the_tool_asks_for() -> None:
    tools = ToolSet([tool("f", text="string", number="number", flag="boolean", whole="integer")])
    values = {"text": "12", "number": "3", "flag": "True", "whole": "many", "other": '{"a": 1}'}
    body = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items())
    message = every_cut(
        choose("qwen3coder", "none", {}),
        f"<tool_call>\n<function=f>\n{body}</function>\n</tool_call>",
        "",
        tools,
    )
    expected = {"text": "12", "number": 3, "flag": True, "whole": "many", "other": {"a": 1}}
    assert calls_of(message) == [("f", expected)]


def test_arguments_are_streamed() -> None:
    """Text arguments leave as they come, in every format that allows it."""
    long = "x" * 50
    outputs = {
        "hermes": f'<tool_call>{{"name": "weather", "arguments": {{"city": "{long}"}}}}</tool_call>',
        "qwen3coder": f"<tool_call>\n<function=weather>\n<parameter=city>\n{long}\n</parameter>\n</function>",
        "mistral": f'[TOOL_CALLS]weather[ARGS]{{"city": "{long}"}}',
        "gemma4": f'<|tool_call>call:weather{{city:<|"|>{long}<|"|>}}<tool_call|>',
    }
    for name, output in outputs.items():
        stream = PartStream(choose(name, "none", {}).parser(TOOLS))
        parts: list[Part] = [part for char in output for part in stream.feed(Delta(char)).parts]
        assert len(parts) > len(long), name


def test_one_call_when_calls_may_not_be_parallel() -> None:
    stream = PartStream(choose("hermes", "none", {}).parser(TOOLS), one_call=True)
    message = collect([stream.feed(Delta(f"<tool_call>{GOOD}</tool_call>" * 3, finish_reason="stop"))])
    assert calls_of(message) == [("weather", {"city": "Rom"})]


def test_names_are_unique() -> None:
    for formats in (TOOL_FORMATS, REASONING_FORMATS):
        listed = names(formats)
        assert len(listed) == len(set(listed))
