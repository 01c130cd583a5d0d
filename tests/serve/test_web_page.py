"""The page at / in a real browser, before a server process with the fake executor."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Iterator

import httpx
import pytest
from browser import browser_page, needs_browser
from playwright.async_api import Page, expect
from proxy_process import proxy_process
from serve_process import Server, running
from serve_wire import read_chat

from lmdeploy.serve.web.pages import _files

SCRIPT = "Hello <b>wörld</b> 👩‍👩‍👧 & more:\n```python\nprint('<i>')\n```\nEnd.$"


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with running(script=SCRIPT, step_seconds=0.01, session_len=4096) as server:
        yield server


@pytest.fixture(scope="module")
def endless() -> Iterator[Server]:
    with running(script="na " * 100, step_seconds=0.02) as server:
        yield server


@pytest.fixture
async def page(server: Server) -> AsyncIterator[Page]:
    async with browser_page() as page:
        await page.goto(server.url)
        await expect(page.locator("#send")).to_be_enabled()
        yield page


async def send(page: Page, text: str) -> None:
    await page.fill("#input", text)
    await page.press("#input", "Enter")


async def finished(page: Page) -> None:
    await expect(page.locator("#stop")).to_be_disabled()


@needs_browser
async def test_a_conversation(page: Page) -> None:
    assert await page.locator("#model option").all_inner_texts() == ["byte-model"]
    assert await page.locator("#state").inner_text() == "ok"
    await send(page, "first <script>alert(1)</script>")
    await finished(page)
    assert await page.locator(".user .text").inner_text() == "first <script>alert(1)</script>"
    answer = page.locator(".assistant .text")
    text = await answer.inner_text()
    assert "Hello <b>wörld</b> 👩‍👩‍👧 & more:" in text  # as text, never as HTML
    assert await answer.locator("pre").inner_text() == "print('<i>')\n"
    assert await page.locator(".error").count() == 0
    assert "tokens/s" in await page.locator("#figures").inner_text()
    async with page.expect_request("**/v1/chat/completions") as sent:
        await send(page, "second")
    body = json.loads((await sent.value).post_data or "")
    assert [turn["role"] for turn in body["messages"]] == ["user", "assistant", "user"]
    assert body["messages"][1]["content"] == SCRIPT.removesuffix("$")
    await finished(page)
    async with page.expect_request("**/v1/chat/completions") as sent:
        await page.click("#again")
    assert len(json.loads((await sent.value).post_data or "")["messages"]) == 3
    await finished(page)
    assert await page.locator(".message").count() == 4
    await page.click("#clear")
    assert await page.locator(".message").count() == 0


@needs_browser
async def test_parameters_reach_the_server(page: Page) -> None:
    await page.fill("#field-temperature", "0.25")
    await page.fill("#field-max_tokens", "5")
    await page.fill("#field-seed", "-7")
    await page.fill("#field-stop", "END\nStop here")
    await page.fill("#system", "Be brief.")
    await page.click("text=More fields, as JSON")
    await page.fill("#extra", '{"logit_bias": {"65": -100}}')
    for stream in (True, False):
        await page.set_checked("#stream", stream)
        async with page.expect_request("**/v1/chat/completions") as sent:
            await send(page, "x")
        body = json.loads((await sent.value).post_data or "")
        assert body["messages"][0] == {"role": "system", "content": "Be brief."}
        expected = {"temperature": 0.25, "max_tokens": 5, "seed": -7, "stop": ["END", "Stop here"]}
        assert {name: body[name] for name in expected} == expected
        assert (body["logit_bias"], body["stream"], body["model"]) == ({"65": -100}, stream, "byte-model")
        assert not {"top_p", "top_k", "min_p"} & set(body)  # an empty input says nothing
        await finished(page)
        assert await page.locator(".assistant .text").last.inner_text() == "Hello"
        assert "length" in await page.locator("#figures").inner_text()


@needs_browser
async def test_wrong_input_is_named_and_not_sent(page: Page) -> None:
    for field, value, word in (
        ("#field-temperature", "9", "Temperature"),
        ("#field-top_k", "1.5", "Top k"),
        ("#extra", "{", "More fields"),
        ("#extra", "[1]", "More fields"),
    ):
        await page.evaluate("document.querySelectorAll('details').forEach((one) => { one.open = true })")
        await page.fill(field, value)
        await send(page, "x")
        await expect(page.locator("#figures")).to_contain_text(word)
        await page.fill(field, "")
    assert await page.locator(".message").count() == 0
    assert await page.input_value("#input") == "x"  # nothing that was typed is lost


@needs_browser
async def test_the_server_s_refusal_is_shown(page: Page) -> None:
    await page.click("text=More fields, as JSON")
    await page.fill("#extra", '{"top_logprobs": 3}')
    await send(page, "x")
    await expect(page.locator(".assistant .error")).to_contain_text("logprobs")
    await page.fill("#extra", "")
    await page.click("#again")
    await finished(page)
    assert "Hello" in await page.locator(".assistant .text").inner_text()
    assert await page.locator(".error").count() == 0


def event(delta: dict[str, object], finish: str | None = None) -> str:
    return (
        "data: " + json.dumps({"choices": [{"index": 0, "delta": delta, "finish_reason": finish}]}) + "\n\n"
    )


@needs_browser
async def test_reasoning_and_tool_calls_are_shown(page: Page) -> None:
    """As another server may answer: the page reads the API, not this project."""

    def call(**fields: object) -> dict[str, object]:
        return {"tool_calls": [{"index": 0, **fields}]}

    events = [
        ": keep-alive\n\n",
        event({"role": "assistant", "content": ""}),
        event({"reasoning_content": "Let me "}),
        event({"reasoning_content": "think."}),
        event({"content": "I look."}),
        event(call(id="call_1", type="function", function={"name": "weather", "arguments": ""})),
        event(call(function={"arguments": '{"city":'})),
        event(call(function={"arguments": ' "Paris"}'})),
        event({}, "tool_calls"),
        "data: [DONE]\n\n",
    ]
    answer = {"content_type": "text/event-stream", "body": "".join(events).replace("\n", "\r\n")}
    await page.route("**/v1/chat/completions", lambda route: route.fulfill(**answer))
    await send(page, "x")
    await finished(page)
    assert await page.locator(".assistant .reasoning div").inner_text() == "Let me think."
    assert await page.locator(".assistant .text").inner_text() == "I look."
    assert await page.locator(".assistant pre.tool").inner_text() == 'weather({"city": "Paris"})'
    async with page.expect_request("**/v1/chat/completions") as sent:
        await send(page, "go on")
    turn = json.loads((await sent.value).post_data or "")["messages"][1]
    assert turn["tool_calls"][0]["function"] == {"name": "weather", "arguments": '{"city": "Paris"}'}
    assert turn["content"] == "I look."


@needs_browser
@pytest.mark.parametrize(
    ("body", "words"),
    [
        (event({"content": "Half"}), "broke off"),
        (event({"content": "Half"}) + 'data: {"error": {"message": "no more memory"}}\n\n', "no more memory"),
    ],
)
async def test_streams_that_end_badly(page: Page, body: str, words: str) -> None:
    answer = {"content_type": "text/event-stream", "body": body}
    await page.route("**/v1/chat/completions", lambda route: route.fulfill(**answer))
    await send(page, "x")
    await finished(page)
    assert await page.locator(".assistant .text").inner_text() == "Half"
    await expect(page.locator(".assistant .error")).to_contain_text(words)


@needs_browser
async def test_stop_ends_the_answer_on_the_server(endless: Server) -> None:
    async with browser_page() as page, endless.http() as http:
        await page.goto(endless.url)
        await expect(page.locator("#send")).to_be_enabled()
        await page.fill("#field-max_tokens", "400")
        await send(page, "x")
        await expect(page.locator(".assistant .text")).to_contain_text("na na na")
        assert (await http.get("/stats")).json()["running"] == 1
        assert await page.locator("#send").is_disabled()
        await page.click("#stop")
        await finished(page)
        for _ in range(100):
            stats = (await http.get("/stats")).json()
            if (stats["running"], stats["blocks_held"]) == (0, 0):
                break
            await asyncio.sleep(0.02)
        assert (stats["running"], stats["blocks_held"]) == (0, 0)
        text = await page.locator(".assistant .text").inner_text()
        assert "na na na" in text  # what was said stays
        assert "stopped" in await page.locator("#figures").inner_text()
        async with page.expect_request("**/v1/chat/completions") as sent:
            await send(page, "go on")
        turns = json.loads((await sent.value).post_data or "")["messages"]
        assert turns[1] == {"role": "assistant", "content": text}
        await page.click("#stop")


@needs_browser
async def test_keys_are_asked_for() -> None:
    with running(script="Yes.$", options={"api_keys": ["secret"]}) as server:
        async with browser_page() as page:
            await page.goto(server.url)
            await expect(page.locator("#state")).to_contain_text("No API key")
            assert await page.locator("#send").is_disabled()
            await page.fill("#key", "wrong")
            await page.press("#key", "Tab")
            await expect(page.locator("#state")).to_contain_text("wrong")
            await page.fill("#key", "secret")
            await page.press("#key", "Tab")
            await expect(page.locator("#send")).to_be_enabled()
            await send(page, "x")
            await finished(page)
            assert await page.locator(".assistant .text").inner_text() == "Yes."
            await page.click("text=This request elsewhere")
            await page.click("text=Copy as curl")
            assert "secret" not in await page.locator("#code").inner_text()
            await page.reload()  # this window keeps it
            await expect(page.locator("#send")).to_be_enabled()


@needs_browser
async def test_the_copied_request_works(server: Server, page: Page) -> None:
    await page.fill("#field-top_k", "3")
    await page.fill("#input", 'it\'s "x"')
    await page.click("text=This request elsewhere")
    for kind, command in (("curl", ["bash", "-c"]), ("Python", [sys.executable, "-c"])):
        await page.click(f"text=Copy as {kind}")
        code = await page.locator("#code").text_content() or ""
        process = await asyncio.create_subprocess_exec(*command, code, stdout=asyncio.subprocess.PIPE)
        out, _ = await process.communicate()
        assert process.returncode == 0
        text = out.decode() if kind == "Python" else read_chat(out.decode(), usage=True).text[0]
        assert text.rstrip("\n") == SCRIPT.removesuffix("$")


@needs_browser
async def test_a_server_that_dies_is_said() -> None:
    with running(script="na " * 100, step_seconds=0.05) as server:
        async with browser_page() as page:
            await page.goto(server.url)
            await expect(page.locator("#send")).to_be_enabled()
            await send(page, "x")
            await expect(page.locator(".assistant .text")).to_contain_text("na na")
            server.process.kill()
            await finished(page)
            await expect(page.locator(".assistant .error")).to_contain_text("cannot be reached")
            await expect(page.locator("#state")).to_contain_text("cannot be reached")


@needs_browser
async def test_the_live_view_has_its_place(server: Server, page: Page) -> None:
    await page.click("nav a[href='#live']")
    await expect(page.locator("#facts")).to_contain_text("byte-model (context 4096 tokens)")
    assert await page.locator("#live-views").count() == 1
    assert not await page.locator("#chat").is_visible()
    await page.go_back()
    assert await page.locator("#chat").is_visible()


@needs_browser
async def test_the_page_of_a_proxy(server: Server) -> None:
    with proxy_process("--nodes", server.url) as proxy:
        async with browser_page() as page:
            await page.goto(proxy.url)
            await expect(page.locator("#send")).to_be_enabled()
            await send(page, "x")
            await finished(page)
            assert "Hello" in await page.locator(".assistant .text").inner_text()


@needs_browser
async def test_narrow_screens_and_keyboards(server: Server) -> None:
    async with browser_page(viewport={"width": 360, "height": 640}) as page:
        await page.goto(server.url)
        await expect(page.locator("#send")).to_be_enabled()
        assert await page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        await page.keyboard.type("typed at once")  # the message has the focus
        await page.keyboard.press("Shift+Enter")
        await page.keyboard.type("two lines")
        await page.keyboard.press("Enter")
        await finished(page)
        assert await page.locator(".user .text").inner_text() == "typed at once\ntwo lines"
        unnamed = "[...document.querySelectorAll('input,textarea,select,button')].filter((one) => "
        unnamed += "!one.labels?.length && !one.ariaLabel && !one.textContent.trim()).map((one) => one.id)"
        assert await page.evaluate(unnamed) == []


async def test_files(server: Server) -> None:
    async with server.http() as http:
        page = await http.get("/")
        assert page.headers["content-type"] == "text/html; charset=utf-8"
        assert "default-src 'self'" in page.headers["content-security-policy"]
        again = await http.get("/", headers={"if-none-match": page.headers["etag"]})
        assert (again.status_code, again.content) == (304, b"")
        head = await http.head("/")
        assert (head.status_code, head.content) == (200, b"")
        assert (await http.get("/web/page.js")).headers["content-type"].startswith("text/javascript")
        for path in ("/web/pages.py", "/web/", "/web/../errors.py", "/web/nope.js"):
            assert (await http.get(path)).status_code == 404
        assert (await http.post("/")).status_code in (404, 405)


def test_nothing_comes_from_elsewhere() -> None:
    for path, file in _files().items():
        text = file.body.decode().replace("http://www.w3.org/", "")
        assert "http://" not in text, path
        assert "https://" not in text, path
        assert "innerHTML" not in text, path
    assert sum(len(file.body) for file in _files().values()) < 60_000


async def test_the_page_can_be_left_out() -> None:
    with running(options={"web_page": False}) as server:
        assert httpx.get(server.url).status_code == 404
