"""The judge against a scripted local server: verdicts, orders, errors, stalls, and when it gives up."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from lmdeploy.errors import ConfigError
from lmdeploy.quality.judge import Pair, judge, winner_in
from lmdeploy.quality.options import JudgeOptions

Script = Callable[[BaseHTTPRequestHandler, dict[str, Any]], None]


def reply(handler: BaseHTTPRequestHandler, body: bytes, status: int = 200) -> None:
    handler.send_response(status)
    handler.send_header("Content-Length", str(len(body)))
    handler.end_headers()
    handler.wfile.write(body)


def said(text: Any) -> bytes:
    return json.dumps({"choices": [{"message": {"content": text}}]}).encode()


@contextmanager
def served(script: Script) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: Any) -> None: ...

        def do_GET(self) -> None:
            assert self.path == "/v1/models"
            reply(self, b'{"data": [{"id": "the-judge"}, {"id": "other"}]}')

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            assert self.path == "/v1/chat/completions"
            try:
                script(self, body)
            except OSError:
                return  # the judge's time was over

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


def answers_of(body: dict[str, Any]) -> tuple[str, str]:
    text = body["messages"][0]["content"]
    a, b = (text.split(f"<answer_{x}>\n")[1].split(f"\n</answer_{x}>")[0] for x in "ab")
    return a, b


def better(handler: BaseHTTPRequestHandler, body: dict[str, Any]) -> None:
    """Prefers the longer answer, whatever the order."""
    a, b = answers_of(body)
    winner = "tie" if len(a) == len(b) else "A" if len(a) > len(b) else "B"
    reply(handler, said(f'Reasons. {{"winner": "{winner}"}}'))


PAIRS = [Pair("1", "q", "long answer", "x"), Pair("2", "q", "x", "long answer"), Pair("3", "q", "ab", "cd")]


def test_verdicts_do_not_depend_on_the_order() -> None:
    bodies = []

    def script(handler: BaseHTTPRequestHandler, body: dict[str, Any]) -> None:
        bodies.append((body, handler.headers["Authorization"]))
        better(handler, body)

    with served(script) as url:
        told: list[int] = []
        found = judge(JudgeOptions(url, key="secret"), PAIRS, lambda _, done, work: told.append(done))
    assert found.verdicts == {"1": "original", "2": "other", "3": "tie"}
    assert found.model == "the-judge" and not found.failures and not found.by_order
    assert sorted(told) == [1, 2, 3]
    assert len(bodies) == 6
    assert {(body["model"], body["temperature"], key) for body, key in bodies} == {
        ("the-judge", 0, "Bearer secret")
    }
    asked = [answers_of(body) for body, _ in bodies]
    assert ("long answer", "x") in asked and ("x", "long answer") in asked


def test_a_judge_that_likes_the_first_is_found_out() -> None:
    with served(lambda handler, _: reply(handler, said('{"winner": "A"}'))) as url:
        found = judge(JudgeOptions(url + "/v1", "m"), PAIRS)
    assert found.by_order == 3 and not found.verdicts and not found.failures


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        (lambda h, _: reply(h, b"{}", 500), "status 500"),
        (lambda h, _: reply(h, b"{}", 401), "status 401"),
        (lambda h, _: reply(h, b"<html>"), "no JSON"),
        (lambda h, _: reply(h, b"[" * 100_000), "no JSON"),
        (lambda h, _: reply(h, b"{}"), "no answer in it"),
        (lambda h, _: reply(h, b'{"choices": []}'), "no answer in it"),
        (lambda h, _: reply(h, said(None)), "no winner"),
        (lambda h, _: reply(h, said("Both are fine, or neither.")), "no winner"),
        (lambda h, _: h.wfile.write(b"nonsense\r\n\r\n"), "no HTTP"),
        (lambda h, _: reply(h, b" " * (2 << 20)), "longer than 1 MiB"),
        (lambda h, _: None, "no "),  # hangs up
    ],
)
def test_failures_are_counted(script: Script, reason: str) -> None:
    with served(script) as url:
        found = judge(JudgeOptions(url, "m", timeout=5), PAIRS[:2])
    assert not found.verdicts and sum(found.failures.values()) == 2
    assert reason in next(iter(found.failures))


def silent(handler: BaseHTTPRequestHandler, _: Any) -> None:
    time.sleep(3)


def dripping(handler: BaseHTTPRequestHandler, _: Any) -> None:
    handler.send_response(200)
    handler.send_header("Content-Length", "1000")
    handler.end_headers()
    for _ in range(30):
        handler.wfile.write(b" ")
        handler.wfile.flush()
        time.sleep(0.1)


def dripping_headers(handler: BaseHTTPRequestHandler, _: Any) -> None:
    for _ in range(30):
        handler.wfile.write(b"H")
        handler.wfile.flush()
        time.sleep(0.1)


@pytest.mark.parametrize("script", [silent, dripping, dripping_headers])
def test_a_stall_ends_in_time(script: Script) -> None:
    with served(script) as url:
        begin = time.monotonic()
        found = judge(JudgeOptions(url, "m", timeout=0.5), PAIRS)
        assert time.monotonic() - begin < 2.5
    assert found.failures == {"no whole reply within 0.5 s": 3}


def test_it_gives_up_on_a_dead_judge() -> None:
    pairs = [Pair(str(i), "q", "a", "b") for i in range(40)]
    found = judge(JudgeOptions("http://127.0.0.1:9", "m", timeout=2), pairs)
    failed = sum(found.failures.values())
    assert 6 <= failed <= 10 and failed + found.not_asked == 40 and not found.verdicts
    assert "no connection" in next(iter(found.failures))


def test_some_failures_do_not_stop_it() -> None:
    count = iter(range(1000))

    def script(handler: BaseHTTPRequestHandler, body: dict[str, Any]) -> None:
        better(handler, body) if next(count) % 5 else reply(handler, b"{}", 503)

    with served(script) as url:
        found = judge(JudgeOptions(url, "m"), [Pair(str(i), "q", "aa", "b") for i in range(20)])
    assert found.verdicts and found.failures and not found.not_asked
    assert set(found.verdicts.values()) == {"original"}


@pytest.mark.parametrize("url", ["", "host:80", "ftp://host/v1", "http://", "http://host:port"])
def test_what_is_no_url(url: str) -> None:
    with pytest.raises(ConfigError, match="--judge"):
        judge(JudgeOptions(url), PAIRS)


@pytest.mark.parametrize(
    ("text", "winner"),
    [
        ('{"winner": "A"}', "a"),
        ('I first thought {"winner": "A"} but {"winner": "B"}', "b"),
        ("```json\n{'winner': 'tie'}\n```", "tie"),
        ("Reasons.\n\n**B**", "b"),
        ("The better answer is A.", "a"),
        ("winner: tie", "tie"),
        ("A is better because it is short", None),
        ("", None),
        ('{"winner": "Alice"}', None),
        ("A or B", None),
    ],
)
def test_parsing(text: str, winner: str | None) -> None:
    assert winner_in(text) == winner
