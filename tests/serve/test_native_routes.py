"""Routes that are not OpenAI's: tokens, /generate, /get_ppl, refusals, the page of the routes."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from typing import Any

import httpx
import pytest
from serve_fakes import ANSWER, Api
from serve_wire import error_of

pytestmark = pytest.mark.asyncio(loop_scope="module")
MESSAGES = [{"role": "user", "content": "hi"}]


async def post(server: Api, path: str, **body: Any) -> httpx.Response:
    return await server.http.post(path, json=body)


async def test_tokenize_a_prompt(server: Api) -> None:
    body = (await post(server, "/tokenize", prompt="hé<s>")).json()
    bos = server.served.frontend.tokenizer.bos_id
    assert body == {"count": 4, "max_model_len": 512, "tokens": [104, 0xC3, 0xA9, bos]}
    named = (await post(server, "/tokenize", prompt="hé", return_token_strs=True)).json()
    assert named["token_strs"] == ["h", "\ufffd", "\ufffd"]
    assert (await post(server, "/tokenize", prompt="")).json()["count"] == 0


async def test_tokenize_is_not_bound_to_the_context(server: Api) -> None:
    assert (await post(server, "/tokenize", prompt="x" * 5000)).json()["count"] == 5000
    error = error_of(await post(server, "/tokenize", prompt="x" * 1_100_000))
    assert error["param"] == "prompt"


async def test_tokenize_messages_as_the_chat_route_does(server: Api) -> None:
    for fields in (
        {},
        {"add_generation_prompt": False},
        {"messages": [*MESSAGES, {"role": "assistant", "content": "a"}], "continue_final_message": True},
        {"add_special_tokens": True},
    ):
        body = {"messages": MESSAGES, **fields}
        tokens = (await post(server, "/tokenize", **body)).json()["tokens"]
        chat = await server.http.post(
            "/v1/chat/completions", json={**body, "max_tokens": 1, "return_token_ids": True}
        )
        assert tokens == chat.json()["prompt_token_ids"]


async def test_begin_marker_of_a_chat_only_where_asked(server: Api) -> None:
    bos = server.served.frontend.tokenizer.bos_id
    plain = (await post(server, "/tokenize", messages=MESSAGES)).json()["tokens"]
    marked = (await post(server, "/tokenize", messages=MESSAGES, add_special_tokens=True)).json()["tokens"]
    assert bos not in plain
    assert marked == [bos, *plain]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "prompt"),
        ({"prompt": "a", "messages": MESSAGES}, "prompt"),
        ({"prompt": 5}, "prompt"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"prompt": "a", "add_special_tokens": 1}, "add_special_tokens"),
        ({"messages": MESSAGES, "chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages"),
        ({"prompt": "a", "model": "other"}, "model"),
    ],
)
async def test_bad_tokenize(server: Api, body: Any, param: str) -> None:
    response = await post(server, "/tokenize", **body)
    assert error_of(response, 404 if param == "model" else 400)["param"] == param


async def test_detokenize(server: Api) -> None:
    tokenizer = server.served.frontend.tokenizer
    ids = [*"hé".encode(), tokenizer.bos_id, 65]
    assert (await post(server, "/detokenize", tokens=ids)).json() == {"prompt": "hé<s>A"}
    assert (await post(server, "/detokenize", tokens=[])).json() == {"prompt": ""}
    for bad in ([-1], [tokenizer.vocab_size], [10**30], ["a"], [1.5], "x", None, [[1]]):
        error = error_of(await post(server, "/detokenize", tokens=bad))
        assert error["param"].startswith("tokens")


async def test_encode(server: Api) -> None:
    assert (await post(server, "/v1/encode", input="abc")).json() == {"input_ids": [97, 98, 99], "length": 3}
    many = (await post(server, "/v1/encode", input=["a", "bc"], add_bos=False)).json()
    assert many == {"input_ids": [[97], [98, 99]], "length": [1, 2]}
    chat = (await post(server, "/v1/encode", input="hi", do_preprocess=True)).json()
    assert chat["input_ids"] == (await post(server, "/tokenize", messages=MESSAGES)).json()["tokens"]
    for bad in (5, None, [5], {}):
        error_of(await post(server, "/v1/encode", input=bad))


async def test_tokenizer_info(server: Api) -> None:
    info = (await server.http.get("/tokenizer_info")).json()
    tokenizer = server.served.frontend.tokenizer
    assert info["eos_token_ids"] == sorted(tokenizer.eos_ids)
    assert info["bos_token_id"] == tokenizer.bos_id
    assert "<|im_start|>" in info["chat_template"]
    assert {"tokenizer_class", "bos_token", "eos_token", "pad_token"} <= set(info)
    error_of(await server.http.get("/tokenizer_info", params={"model": "other"}), 404)
    assert (await server.http.head("/tokenizer_info")).status_code == 200


async def test_generate(server: Api) -> None:
    body = (await post(server, "/generate", prompt="hi", return_logprob=True)).json()
    assert body["text"] == ANSWER
    assert bytes(body["output_ids"][:-1]).decode() == ANSWER
    info = body["meta_info"]
    assert (info["prompt_tokens"], info["completion_tokens"]) == (2, len(ANSWER.encode()) + 1)
    assert info["finish_reason"] == {"type": "stop"}
    assert [token for _, token in info["output_token_logprobs"]] == body["output_ids"]
    by_ids = (await post(server, "/generate", input_ids=[104, 105], max_tokens=4)).json()
    assert by_ids["text"] == ANSWER[:4]
    assert by_ids["meta_info"]["finish_reason"] == {"type": "length"}
    assert by_ids["meta_info"]["output_token_logprobs"] is None
    unbound = (await post(server, "/generate", prompt="hi", ignore_eos=True)).json()
    assert unbound["meta_info"]["completion_tokens"] == 128


async def test_generate_streamed_equals_whole(server: Api) -> None:
    fields = {"prompt": "hi", "return_logprob": True, "stop": "then"}
    whole = (await post(server, "/generate", **fields)).json()
    text = (await post(server, "/generate", **fields, stream=True)).text
    events = [e.removeprefix("data: ") for e in text.strip().split("\n\n") if not e.startswith(":")]
    assert events.pop() == "[DONE]"
    parts = [json.loads(event) for event in events]
    assert "".join(part["text"] for part in parts) == whole["text"]
    assert [i for part in parts for i in part["output_ids"]] == whole["output_ids"]
    reasons = [part["meta_info"]["finish_reason"] for part in parts]
    assert reasons[-1] == whole["meta_info"]["finish_reason"]
    assert not any(reasons[:-1])


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "prompt"),
        ({"prompt": "a", "input_ids": [1]}, "prompt"),
        ({"input_ids": []}, "input_ids"),
        ({"input_ids": [10**6]}, "input_ids"),
        ({"input_ids": "a"}, "input_ids"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": "x" * 600}, "prompt"),
        ({"prompt": "a", "n": 2}, "n"),
        ({"prompt": "a", "max_tokens": 0}, "max_tokens"),
        ({"prompt": "a", "temperature": 3}, "temperature"),
        ({"prompt": "a", "image_data": "http://x"}, "image_data"),
    ],
)
async def test_bad_generate(server: Api, body: Any, param: str) -> None:
    error = error_of(await post(server, "/generate", **body))
    assert error["param"] == param


async def test_perplexity_is_the_mean_of_the_prompt_logprobs(server: Api) -> None:
    """As /v1/completions tells them with echo."""
    ppl = (await post(server, "/get_ppl", input="some text")).json()["ppl"]
    scored = (await server.complete("some text", echo=True, max_tokens=0, logprobs=0)).json()
    values = scored["choices"][0]["logprobs"]["token_logprobs"][1:]
    assert ppl == pytest.approx(-sum(values) / len(values))
    ids = list(b"some text")
    assert (await post(server, "/get_ppl", input=ids)).json()["ppl"] == ppl
    for bad in ("x", "", [], [65], [65, 10**6], 5, None, "x" * 600):
        assert error_of(await post(server, "/get_ppl", input=bad))["param"].startswith("input")


async def test_embeddings_are_refused(server: Api) -> None:
    for path in ("/v1/embeddings", "/pooling"):
        for body in ({"input": "x", "encoding_format": "base64"}, {}, {"model": "byte-model"}):
            assert "does not support" in error_of(await post(server, path, **body))["message"]
        error_of(await post(server, path, model="other"), 404)
        error_of(await server.http.post(path, content=b"["), 400)


class _Links(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.links: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.links += [value or "" for name, value in attrs if name in ("src", "href")]


async def test_docs_page_needs_no_other_host(server: Api) -> None:
    page = await server.http.get("/docs")
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    found = _Links()
    found.feed(page.text)
    assert found.links == ["openapi.json"]
    assert "script" not in found.tags
    for path in (await server.http.get("/openapi.json")).json()["paths"]:
        assert f"{path}</code>" in page.text
    assert re.search(r"<code>temperature</code><td>number from 0 to 2", page.text)
    assert (await server.configure(docs=False).http.get("/docs")).status_code == 404
    assert (await server.http.head("/docs")).status_code == 200
