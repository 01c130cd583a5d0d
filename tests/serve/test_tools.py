"""Tools and reasoning over HTTP: each form of tool_choice, whole and streamed alike (K04, K05, K24, K25)."""

from __future__ import annotations

import json
from typing import Any

import pytest
from serve_fakes import Api, api
from serve_wire import USAGE, counts, error_of, read_chat

from lmdeploy.serve.served import ServerOptions

CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln"}}\n</tool_call>'
OTHER = '<tool_call>\n{"name": "time", "arguments": {}}\n</tool_call>'
THOUGHT = "<think>\nI ask.\n</think>\n\n"
WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
TIME: dict[str, Any] = {"type": "function", "function": {"name": "time"}}
TOOLS = [WEATHER, TIME]
NAMED = {"type": "function", "function": {"name": "weather"}}
# The template of Hermes and Qwen in short: tools in front, calls in the words of the assistant.
TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    '{% for c in m.tool_calls or [] %}<tool_call>\n{{ {"name": c.function.name, "arguments": '
    "c.function.arguments} | tojson }}\n</tool_call>{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def server(script: str, template: str = TEMPLATE, tool: str = "hermes", **more: Any) -> Any:
    return api(script, 4096, template=template, parsers=(tool, "think"), num_blocks=512, **more)


async def both(server: Api, **fields: Any) -> tuple[dict[str, Any], Any]:
    """(whole choice, seen stream) of the same request, after comparing them."""
    response = await server.chat(**fields)
    assert response.status_code == 200, response.text
    body = response.json()
    seen = read_chat((await server.chat(**fields, **USAGE)).text, usage=True)
    (choice,) = body["choices"]
    message = choice["message"]
    assert seen.text[0] == (message["content"] or "")
    assert seen.reasoning[0] == message.get("reasoning_content", "") == message.get("reasoning", "")
    assert seen.finish[0] == choice["finish_reason"]
    assert [c["function"] for c in seen.calls[0]] == [c["function"] for c in message.get("tool_calls", [])]
    assert seen.usage is not None
    assert counts(seen.usage) == counts(body["usage"])
    details = body["usage"]["completion_tokens_details"]
    assert seen.usage["completion_tokens_details"] == details
    return choice, seen


def calls_of(choice: dict[str, Any]) -> list[tuple[str, Any]]:
    calls = choice["message"].get("tool_calls", [])
    assert len({call["id"] for call in calls}) == len(calls)
    assert all(call["id"].startswith("call_") and len(call["id"]) >= 14 for call in calls)
    return [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in calls]


@pytest.mark.parametrize(
    ("choice", "finish"),
    [(None, "tool_calls"), ("auto", "tool_calls"), ("required", "tool_calls"), (NAMED, "stop")],
)
async def test_a_call(choice: Any, finish: str) -> None:
    async with server(CALL + "$") as api:
        whole, _ = await both(api, tools=TOOLS, tool_choice=choice)
        assert calls_of(whole) == [("weather", {"city": "Köln"})]
        assert whole["message"]["content"] is None
        assert whole["finish_reason"] == finish


async def test_finish_reason_of_a_named_tool_can_be_chosen() -> None:
    async with server(CALL + "$", options=ServerOptions(named_tool_finish="tool_calls")) as api:
        whole, _ = await both(api, tools=TOOLS, tool_choice=NAMED)
        assert whole["finish_reason"] == "tool_calls"


async def test_parallel_calls_stay_apart() -> None:
    async with server(f"Two.\n{CALL}\n{OTHER}$") as api:
        whole, seen = await both(api, tools=TOOLS)
        assert calls_of(whole) == [("weather", {"city": "Köln"}), ("time", {})]
        assert [json.loads(c["function"]["arguments"]) for c in seen.calls[0]] == [{"city": "Köln"}, {}]
        assert whole["message"]["content"] == "Two."
        whole, _ = await both(api, tools=TOOLS, parallel_tool_calls=False)
        assert calls_of(whole) == [("weather", {"city": "Köln"})]


async def test_arguments_come_in_pieces() -> None:
    async with server(CALL + "$") as api:
        seen = read_chat((await api.chat(tools=TOOLS, stream=True)).text)
        deltas = [c["choices"][0]["delta"] for c in seen.chunks if c["choices"]]
        pieces = [d["tool_calls"][0]["function"]["arguments"] for d in deltas if "tool_calls" in d]
        assert len(pieces) > 5
        assert json.loads("".join(pieces)) == {"city": "Köln"}


async def test_length_beats_calls_and_stop_ends_them() -> None:
    async with server(CALL + "$") as api:
        whole, _ = await both(api, tools=TOOLS, max_tokens=50)
        assert whole["finish_reason"] == "length"
        whole, _ = await both(api, tools=TOOLS, stop=["ln"])
        assert (whole["finish_reason"], whole["stop_reason"]) == ("tool_calls", "ln")


async def test_no_calls_where_none_are_wanted() -> None:
    async with server(CALL + "$") as api:
        for fields in ({}, {"tools": TOOLS, "tool_choice": "none"}, {"tools": []}):
            whole, _ = await both(api, **fields)
            assert whole["message"]["content"] == CALL
            assert "tool_calls" not in whole["message"]
            assert whole["finish_reason"] == "stop"
    async with server(CALL + "$", tool="none") as api:
        whole, _ = await both(api, tools=TOOLS)
        assert whole["message"]["content"] == CALL


async def test_reasoning_beside_calls() -> None:
    async with server(f"{THOUGHT}Now:\n\n{CALL}$") as api:
        whole, _ = await both(api, tools=TOOLS)
        message = whole["message"]
        assert (message["reasoning_content"], message["content"]) == ("I ask.", "Now:")
        assert calls_of(whole) == [("weather", {"city": "Köln"})]
        whole, _ = await both(api, separate_reasoning=False)
        assert whole["message"]["content"] == f"{THOUGHT}Now:\n\n{CALL}"
        usage = (await api.chat(tools=TOOLS)).json()["usage"]
        # Counted from the first token on: the bytes of the words.
        assert usage["completion_tokens_details"]["reasoning_tokens"] == len("I ask.")


async def test_reasoning_that_the_prompt_opened() -> None:
    template = TEMPLATE.replace("assistant\n{% endif %}", "assistant\n<think>\n{% endif %}")
    async with server("hm\n</think>\n\nyes$", template) as api:
        whole, _ = await both(api)
        assert (whole["message"]["reasoning_content"], whole["message"]["content"]) == ("hm", "yes")


async def test_tokens_belong_to_the_chunks_of_their_text() -> None:
    async with server(f"{THOUGHT}Now:\n\n{CALL} $") as api:
        fields: dict[str, Any] = {"tools": TOOLS, "logprobs": True, "return_token_ids": True}
        whole = (await api.chat(**fields)).json()["choices"][0]
        seen = read_chat((await api.chat(**fields, stream=True)).text)
        entries = [e for part in seen.logprobs[0] for e in part["content"]]
        assert [e["token"] for e in entries] == [e["token"] for e in whole["logprobs"]["content"]]
        chunks = [c["choices"][0] for c in seen.chunks if c["choices"]]
        ids = [i for chunk in chunks for i in chunk.get("token_ids", [])]
        assert ids == whole["token_ids"]


async def test_allowed_tools() -> None:
    def allowed(mode: str, *names: str) -> dict[str, Any]:
        tools = [{"type": "function", "function": {"name": name}} for name in names]
        return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}

    async with server(CALL + "$") as api:
        for mode in ("auto", "required"):
            whole, _ = await both(api, tools=TOOLS, tool_choice=allowed(mode, "weather"))
            assert calls_of(whole) == [("weather", {"city": "Köln"})]
            assert whole["finish_reason"] == "tool_calls"
        prompt = await rendered(api, tools=TOOLS, tool_choice=allowed("auto", "time"))
        assert '"time"' in prompt and '"weather"' not in prompt
        error = error_of(await api.chat(tools=TOOLS, tool_choice=allowed("auto", "nothing")))
        assert error["param"] == "tool_choice"


async def rendered(api: Api, messages: list[dict[str, Any]] | None = None, **fields: Any) -> str:
    messages = messages or [{"role": "user", "content": "hi"}]
    body = {"messages": messages, "return_token_ids": True, "max_tokens": 1, **fields}
    response = await api.http.post("/v1/chat/completions", json=body)
    assert response.status_code == 200, response.text
    ids = response.json()["prompt_token_ids"]
    return api.served.frontend.tokenizer.decode(ids, skip_special_tokens=False)


PAST = {
    "id": "call_0123456789",
    "type": "function",
    "function": {"name": "weather", "arguments": '{"city": "Bonn"}'},
}


@pytest.mark.parametrize("turn", [{"content": None}, {}, {"content": ""}], ids=str)
@pytest.mark.parametrize("template", [TEMPLATE, None], ids=["own", "no tools"])
async def test_a_turn_of_calls_only(turn: dict[str, Any], template: str | None) -> None:
    """K24, also with a template that knows nothing of calls: call and result are in the prompt."""
    messages = [
        {"role": "user", "content": "q"},
        {"role": "assistant", **turn, "tool_calls": [PAST]},
        {"role": "tool", "content": "17 degrees", "tool_call_id": "call_0123456789"},
    ]
    async with server("ok$", *([template] if template else [CHATML])) as api:
        prompt = await rendered(api, messages, tools=TOOLS)
        assert '{"name": "weather", "arguments": {"city": "Bonn"}}' in prompt
        assert "17 degrees" in prompt
        assert '"time"' in prompt


CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


async def test_templates_without_tools_get_them_in_words() -> None:
    async with server(CALL + "$", CHATML, tool="auto") as api:
        plain = await rendered(api)
        assert plain == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
        messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi"}]
        prompt = await rendered(api, messages, tools=TOOLS)
        assert prompt.startswith("<|im_start|>system\nBe brief.\n\nYou can call")
        assert '"required": ["city"]' in prompt
        whole, _ = await both(api, tools=TOOLS)
        assert calls_of(whole) == [("weather", {"city": "Köln"})]


async def test_ids_of_nine_characters_where_the_template_wants_them() -> None:
    template = (
        "{% for m in messages %}{% for c in m.tool_calls or [] %}"
        "{% if c.id | length != 9 %}{{ raise_exception('ids must have length 9!') }}{% endif %}[{{ c.id }}]"
        "{% endfor %}{{ m.content }}({{ m.tool_call_id }}){% endfor %}"
    )
    messages = [
        {"role": "assistant", "tool_calls": [PAST]},
        {"role": "tool", "content": "r", "tool_call_id": "call_0123456789"},
    ]
    async with server("ok$", template, tool="auto") as api:
        prompt = await rendered(api, messages)
        call_id = prompt[1:10]
        assert prompt.startswith(f"[{call_id}]") and f"r({call_id})" in prompt


def function(**fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", **fields}}


BAD = [
    ({"tools": [1]}, "tools[0]"),
    ({"tools": {}}, "tools"),
    ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
    ({"tools": [{"type": "function"}]}, "tools[0].function"),
    ({"tools": [{"type": "function", "function": 1}]}, "tools[0].function"),
    ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name"),
    ({"tools": [function(name="no spaces")]}, "tools[0].function.name"),
    ({"tools": [function(name="x" * 65)]}, "tools[0].function.name"),
    ({"tools": [function(parameters=[])]}, "tools[0].function.parameters"),
    ({"tools": [function(description=1)]}, "tools[0].function.description"),
    ({"tools": [function(strict="yes")]}, "tools[0].function.strict"),
    ({"tools": [function(), function()]}, "tools[1].function.name"),
    ({"tools": TOOLS, "tool_choice": "maybe"}, "tool_choice"),
    ({"tools": TOOLS, "tool_choice": 1}, "tool_choice"),
    ({"tools": TOOLS, "tool_choice": []}, "tool_choice"),
    ({"tools": TOOLS, "tool_choice": {"type": "function"}}, "tool_choice.function.name"),
    ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "g"}}}, "tool_choice"),
    ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": []}}}, "tool_choice"),
    ({"tools": TOOLS, "tool_choice": {"type": "allowed_tools"}}, "tool_choice.allowed_tools.tools"),
    ({"tools": TOOLS, "parallel_tool_calls": 1}, "parallel_tool_calls"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tool_choice": NAMED}, "tool_choice"),
    ({"separate_reasoning": "no"}, "separate_reasoning"),
]


@pytest.mark.parametrize(("fields", "param"), BAD, ids=lambda value: json.dumps(value)[:70])
async def test_refusals(bad: Api, fields: dict[str, Any], param: str) -> None:
    for stream in (False, True):
        assert error_of(await bad.chat(**fields, stream=stream))["param"] == param


@pytest.fixture
async def bad() -> Any:
    async with server("ok$") as api:
        yield api


async def test_schemas_of_agents_are_taken() -> None:
    """Keywords that no grammar enforces, with a choice of auto."""
    schema = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "type": "object",
        "properties": {"a": {"type": "string", "pattern": "^(?!x)", "format": "uri", "not": {"const": ""}}},
        "patternProperties": {"^x": {}},
        "default": {},
        "if": {},
    }
    async with server("ok$") as api:
        assert (await api.chat(tools=[function(parameters=schema)])).status_code == 200
        assert (await api.chat(tools=[function(parameters=None, description=None)])).status_code == 200


async def test_official_client_streams_calls() -> None:
    async with server(f"Two.\n{CALL}\n{OTHER}$") as api:
        messages: Any = [{"role": "user", "content": "hi"}]
        names = []
        async with api.openai.chat.completions.stream(
            model="byte-model",
            messages=messages,
            tools=TOOLS,  # type: ignore[arg-type]
        ) as stream:
            async for event in stream:
                if event.type == "tool_calls.function.arguments.done":
                    names.append((event.name, json.loads(event.arguments)))
            final = await stream.get_final_completion()
        assert names == [("weather", {"city": "Köln"}), ("time", {})]
        assert final.choices[0].finish_reason == "tool_calls"


FORM = {
    "type": "json_schema",
    "json_schema": {
        "name": "n",
        "schema": {
            "type": "object",
            "properties": {"n": {"type": "integer"}},
            "required": ["n"],
            "additionalProperties": False,
        },
    },
}


@pytest.mark.parametrize("form", [FORM, {"type": "regex_schema", "regex_schema": r"\{\"n\": [0-9]+/?\}"}])
async def test_a_shape_and_tools(form: dict[str, Any]) -> None:
    """Calls may come, and an answer that is none has the shape."""
    async with server(CALL + "$") as api:
        whole, _ = await both(api, tools=TOOLS, response_format=form)
        assert calls_of(whole) == [("weather", {"city": "Köln"})]
    async with server('{"n": 7}$') as api:
        whole, _ = await both(api, tools=TOOLS, response_format=form)
        assert json.loads(whole["message"]["content"]) == {"n": 7}
        assert whole["finish_reason"] == "stop"
    async with server("Just words.$") as api:
        fields = {"tools": TOOLS, "response_format": form, "temperature": 0, "max_tokens": 9}
        (choice,) = (await api.chat(**fields)).json()["choices"]
        text = choice["message"]["content"] or ""
        assert text.startswith("{") or "<tool_call>".startswith(text[:11])


async def test_a_shape_behind_reasoning() -> None:
    """Where the prompt ends in a thought, the shape is that of the answer behind it."""
    template = TEMPLATE.replace("assistant\n{% endif %}", "assistant\n<think>\n{% endif %}")
    async with server('I count.\n</think>\n\n{"n": 7}$', template) as api:
        whole, _ = await both(api, response_format=FORM)
        assert "I count." in whole["message"]["reasoning"]
        assert json.loads(whole["message"]["content"]) == {"n": 7}


async def test_a_lark_grammar_and_tools() -> None:
    async with server("x$") as api:
        response = await api.chat(tools=TOOLS, response_format={"type": "grammar", "grammar": 'start: "x"'})
        assert error_of(response)["param"] == "tool_choice"
