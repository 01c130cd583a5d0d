"""What the model sees: `lmdeploy prompt` with all kinds of other sides; the server's view of a request."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from serve_fakes import api
from serve_wire import error_of
from text_models import demo_fields, write_demo_directory
from transformers import AutoTokenizer

from lmdeploy.cli.main import main
from lmdeploy.serve.kept_prompts import KeptPrompts

MESSAGES = [{"role": "user", "content": "Größe of 👩‍👩‍👧?"}]
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_demo_directory(tmp_path_factory.mktemp("prompt") / "model")


@pytest.fixture
def messages(tmp_path: Path) -> Path:
    file = tmp_path / "messages.json"
    file.write_text(json.dumps(MESSAGES), encoding="utf-8")
    return file


def shown(capsys: pytest.CaptureFixture[str], code: int, *argv: object) -> str:
    """Standard output of `lmdeploy prompt` with these words."""
    assert main(["prompt", *map(str, argv)]) == code, capsys.readouterr().err
    return capsys.readouterr().out


def expected_ids(model: Path, **more: Any) -> list[int]:
    """By transformers."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    text = tokenizer.apply_chat_template(MESSAGES, add_generation_prompt=True, tokenize=False, **more)
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def test_text_ids_and_tokens(capsys: pytest.CaptureFixture[str], model: Path, messages: Path) -> None:
    text = shown(capsys, 0, model, "--messages", messages)
    ids = expected_ids(model)
    rows = [line.split(maxsplit=2) for line in text.split("characters\n")[1].splitlines()]
    assert [int(row[1]) for row in rows] == ids
    assert rows[0][2] == "<|im_start|> (control token)"
    assert "user\nGröße of 👩‍👩‍👧?<|im_end|>\n<|im_start|>assistant\n--- " in text
    body = json.loads(shown(capsys, 0, model, "--messages", messages, "--json"))
    assert [t["id"] for t in body["prompt"]["tokens"]] == ids
    plain = json.loads(shown(capsys, 0, model, "--text", "hi", "--json"))
    assert plain["prompt"]["text"] == "hi"


def test_the_end_of_the_prompt_and_variables(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, messages: Path, model: Path
) -> None:
    template = tmp_path / "own.jinja"
    template.write_text("{{ messages[0].content }}|{{ extra }}|{% if add_generation_prompt %}A{% endif %}")
    base = (model, "--messages", messages, "--chat-template", template, "--json")
    more = ("--chat-template-kwargs", '{"extra": 7}', "--no-generation-prompt")
    assert json.loads(shown(capsys, 0, *base))["prompt"]["text"].endswith("?||A")
    assert json.loads(shown(capsys, 0, *base, *more))["prompt"]["text"].endswith("?|7|")


def test_tools_as_the_server_gives_them(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, model: Path
) -> None:
    request = tmp_path / "request.json"
    request.write_text(json.dumps({"messages": MESSAGES, "tools": TOOLS, "temperature": 0}), encoding="utf-8")
    assert '"name": "weather"' in shown(capsys, 0, model, "--messages", request)
    tools = tmp_path / "tools.json"
    tools.write_text('[{"type": "function", "function": {"name": "time"}}]')
    text = shown(capsys, 0, model, "--messages", request, "--tools", tools)
    assert '"time"' in text and '"weather"' not in text


def test_against_transformers(capsys: pytest.CaptureFixture[str], model: Path, messages: Path) -> None:
    text = shown(capsys, 0, model, "--messages", messages, "--against", "transformers")
    assert text.startswith(f"equal: {len(expected_ids(model))} tokens")


def test_against_another_model(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, model: Path, messages: Path
) -> None:
    other = write_demo_directory(tmp_path / "other")
    assert "equal" in shown(capsys, 0, model, "--messages", messages, "--against", other)
    config = json.loads((other / "tokenizer_config.json").read_text())
    config["chat_template"] = demo_fields()["tokenizer.chat_template"].replace("assistant", "helper")
    (other / "tokenizer_config.json").write_text(json.dumps(config))
    text = shown(capsys, 1, model, "--messages", messages, "--against", other)
    ids = expected_ids(model)
    theirs = expected_ids(other)
    at = next(i for i, (a, b) in enumerate(zip(ids, theirs, strict=False)) if a != b)
    assert text.startswith(f"first difference at number {at} of the tokens")
    (marked,) = [line for line in text.splitlines() if line.startswith(">")]
    assert marked.split()[1:3] == [str(at), str(ids[at])]
    assert f"{theirs[at]} " in marked
    body = json.loads(shown(capsys, 1, model, "--messages", messages, "--against", other, "--json"))
    assert body["first_difference"] == at


Answer = Callable[[str, dict[str, Any]], tuple[int, Any]]


@contextmanager
def answering(answer: Answer) -> Iterator[str]:
    """The address of a server that answers POST as the function says."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            status, value = answer(self.path, body)
            data = json.dumps(value).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()


def test_against_servers(capsys: pytest.CaptureFixture[str], model: Path, messages: Path) -> None:
    ids = expected_ids(model)
    base = (model, "--messages", messages, "--against")

    def tokens(path: str, body: dict[str, Any]) -> tuple[int, Any]:
        assert (path, body["messages"]) == ("/tokenize", MESSAGES)
        return 200, {"count": len(ids), "tokens": ids}

    with answering(tokens) as url:
        assert shown(capsys, 0, *base, f"{url}/v1").startswith(f"equal: {len(ids)} tokens")

    def text_only(path: str, body: dict[str, Any]) -> tuple[int, Any]:
        """As llama.cpp's server: /tokenize knows no messages."""
        return 200, {"tokens": []} if path == "/tokenize" else {"prompt": "<|im_start|>system\nOther"}

    with answering(text_only) as url:
        text = shown(capsys, 1, *base, url)
        assert text.startswith("first difference at number 19 of the characters")

    with answering(lambda *_: (404, {"error": {"message": "no such route"}})) as url:
        assert main(["prompt", *map(str, base), url]) != 0
        assert "answers 404: 'no such route'" in capsys.readouterr().err
    assert main(["prompt", *map(str, base), "http://127.0.0.1:1"]) != 0
    assert "does not answer" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ([], "either --messages FILE or --text"),
        (["--messages", "nowhere.json"], "nowhere.json cannot be read"),
        (["--messages", __file__], "is not JSON"),
        (["--text", "a", "--tools", "b"], "--tools needs --messages"),
        (["--text", "a", "--chat-template-kwargs", "[1]"], "must be a JSON object"),
    ],
)
def test_mistakes(capsys: pytest.CaptureFixture[str], model: Path, argv: list[str], words: str) -> None:
    assert main(["prompt", str(model), *argv]) != 0
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert words in err


async def test_prompt_of_a_request() -> None:
    """By the id of the answer and by the client's own id, while it is among the last ones."""
    async with api("ok$") as server:
        error_of(await server.http.get("/prompts/anything"), 404)
        server.served.kept = KeptPrompts(2)
        body = {"messages": [{"role": "user", "content": "hé"}], "return_token_ids": True}
        answer = (
            await server.http.post("/v1/chat/completions", json=body, headers={"x-request-id": "mine"})
        ).json()
        for name in (answer["id"], "mine"):
            (kept,) = (await server.http.get(f"/prompts/{name}")).json()["data"]
            assert [t["id"] for t in kept["tokens"]] == answer["prompt_token_ids"]
            assert kept["text"] == "<|im_start|>user\nhé<|im_end|>\n<|im_start|>assistant\n"
            assert (kept["id"], kept["request_id"], kept["model"]) == (answer["id"], "mine", "byte-model")
            assert [t["text"] for t in kept["tokens"] if t["control"]] == [
                "<|im_start|>",
                "<|im_end|>",
                "<|im_start|>",
            ]
        two = (await server.complete(["a", "b"])).json()
        found = (await server.http.get(f"/prompts/{two['id']}")).json()["data"]
        assert [kept["text"] for kept in found] == ["a", "b"]
        error_of(await server.http.get("/prompts/mine"), 404)
