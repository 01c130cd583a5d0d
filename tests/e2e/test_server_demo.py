"""`lmdeploy serve api_server` with the demo model and the official client."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
import pytest_asyncio
from demo_model import demo_gguf
from safetensors.numpy import load_file, save_file
from tiny_model import write_tiny_model

from lmdeploy.runtime.machine import anonymous_bytes
from lmdeploy.runtime.memory_plan import MAX_BODIES, server_bytes

pytestmark = pytest.mark.asyncio(loop_scope="module")

SESSION_LEN = 1024
QUESTION: Any = [{"role": "user", "content": "What is the capital of France?"}]


class Server:
    """The command in a process of its own."""

    def __init__(self, *flags: str) -> None:
        command = [sys.executable, "-m", "lmdeploy", "serve", "api_server", str(demo_gguf()), *flags]
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
        )
        self.output = ""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.output += line
            if found := re.search(r"at (http://\S+)/v1$", line):
                self.url = found[1]
                return
        raise AssertionError(f"the server did not start: {self.output}")

    def engine(self) -> int:
        """Process id of the engine."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text()
        return int(children.split()[-1])

    def end(self) -> int:
        self.process.terminate()
        try:
            return self.process.wait(20)
        finally:
            self.process.kill()
            self.process.communicate()


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    flags = ["--server-name", "127.0.0.1", "--server-port", "0", "--model-name", "demo"]
    limits = ["--session_len", str(SESSION_LEN), "--max-batch-size", "8"]
    server = Server(*flags, *limits)
    try:
        yield server
    finally:
        assert server.end() == 0


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def client(server: Server) -> AsyncIterator[openai.AsyncOpenAI]:
    url = server.url + "/v1"
    async with openai.AsyncOpenAI(api_key="x", base_url=url, max_retries=0, timeout=120) as client:
        yield client


async def streamed(client: openai.AsyncOpenAI, messages: Any, **fields: Any) -> tuple[str, Any, Any]:
    """Text, finish_reason and usage of a streamed answer."""
    text, finish, usage = "", None, None
    stream = await client.chat.completions.create(
        model="demo", messages=messages, stream=True, stream_options={"include_usage": True}, **fields
    )
    async for chunk in stream:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            text += choice.delta.content or ""
            finish = choice.finish_reason or finish
    return text, finish, usage


async def test_plan_is_printed_before_the_address(server: Server) -> None:
    for word in ("weights", "KV cache", str(SESSION_LEN), "threads"):
        assert word in server.output
    assert server.output.rstrip().endswith("/v1")


async def test_names(client: openai.AsyncOpenAI) -> None:
    ids = [m.id for m in (await client.models.list()).data]
    assert ids == ["demo", demo_gguf().name]
    for name in (*ids, str(demo_gguf())):
        await client.completions.create(model=name, prompt="a", max_tokens=1)


async def test_answer(client: openai.AsyncOpenAI) -> None:
    """Streamed and not, the same words and the same counts."""
    whole = await client.chat.completions.create(
        model="demo", messages=QUESTION, temperature=0, max_tokens=40
    )
    text, finish, usage = await streamed(client, QUESTION, temperature=0, max_tokens=40)
    assert whole.choices[0].message.content == text
    assert "Paris" in text
    assert whole.choices[0].finish_reason == finish == "stop"
    assert whole.usage is not None
    assert whole.usage.completion_tokens == usage.completion_tokens
    assert whole.usage.prompt_tokens == usage.prompt_tokens


async def test_stop_strings(client: openai.AsyncOpenAI) -> None:
    """A stop string that begins inside a token and spans several."""
    plain, _, _ = await streamed(client, QUESTION, temperature=0, max_tokens=40)
    stop = plain[10:24]
    fields: dict[str, Any] = {"temperature": 0, "max_tokens": 40, "stop": [stop]}
    whole = await client.chat.completions.create(model="demo", messages=QUESTION, **fields)
    text, finish, _ = await streamed(client, QUESTION, **fields)
    assert text == whole.choices[0].message.content == plain[:10]
    assert finish == whole.choices[0].finish_reason == "stop"


async def test_32_streams_at_once(client: openai.AsyncOpenAI) -> None:
    """Every stream equals the answer to the same request alone, seeded ones too."""

    async def answer(number: int) -> str:
        messages = [{"role": "user", "content": f"Count from {number} to {number + 5}."}]
        sampling: dict[str, Any] = {"temperature": 0.8, "seed": number} if number % 2 else {"temperature": 0}
        text, _, _ = await streamed(client, messages, max_tokens=24, **sampling)
        return text

    together = await asyncio.gather(*(answer(i) for i in range(32)))
    assert all(together)
    alone = [await answer(i) for i in (0, 1, 30, 31)]
    assert alone == [together[i] for i in (0, 1, 30, 31)]


async def test_aborted_streams_leave_room(client: openai.AsyncOpenAI) -> None:
    """More cache than there is would be needed if anything of the aborted requests were kept."""

    async def leave(number: int) -> None:
        stream = await client.chat.completions.create(
            model="demo",
            messages=[{"role": "user", "content": f"{number} " * 40}],
            stream=True,
            max_tokens=600,
        )
        async for _ in stream:
            await stream.close()
            break

    await asyncio.gather(*(leave(i) for i in range(16)))
    started = time.monotonic()
    text, _, _ = await streamed(client, QUESTION, temperature=0, max_tokens=8)
    assert text
    assert time.monotonic() - started < 10


async def test_long_prompts(client: openai.AsyncOpenAI) -> None:
    """What fits is answered in the room that is left, what does not fit is refused."""
    words = "word " * (SESSION_LEN - 100)
    answer = await client.completions.create(
        model="demo", prompt=words, max_tokens=4096, temperature=0, extra_body={"ignore_eos": True}
    )
    assert answer.usage is not None
    assert answer.usage.total_tokens == SESSION_LEN
    assert (answer.choices[0].finish_reason, bool(answer.choices[0].text)) == ("length", True)
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError, match="maximum context length is 1024 tokens") as caught:
            await client.chat.completions.create(
                model="demo", messages=[{"role": "user", "content": words * 2}], stream=stream
            )
        assert caught.value.code == "context_length_exceeded"


async def test_logprobs_of_the_sampled_token(client: openai.AsyncOpenAI) -> None:
    answer = await client.chat.completions.create(
        model="demo", messages=QUESTION, temperature=0, max_tokens=40, logprobs=True, top_logprobs=3
    )
    content = answer.choices[0].logprobs and answer.choices[0].logprobs.content
    assert content
    joined = b"".join(bytes(entry.bytes or []) for entry in content)
    assert joined.decode() == answer.choices[0].message.content
    for entry in content:
        assert entry.top_logprobs[0].token == entry.token  # greedy takes the most likely one
        assert entry.top_logprobs[0].logprob == pytest.approx(entry.logprob)


async def test_echo_scores_the_prompt(client: openai.AsyncOpenAI) -> None:
    async def scores(prompt: str) -> list[float | None]:
        answer = await client.completions.create(
            model="demo", prompt=prompt, echo=True, max_tokens=0, logprobs=1
        )
        found = answer.choices[0].logprobs
        assert found is not None
        assert "".join(found.tokens or []) == answer.choices[0].text == prompt
        return list(found.token_logprobs or [])

    true, false = await scores("Paris is the capital of France"), await scores("Paris is the capital of Peru")
    assert true[0] is None
    assert all(value is not None and value < 0 for value in true[1:])
    assert true[:-1] == pytest.approx(false[:-1])
    assert (true[-1] or 0) > (false[-1] or 0) + 3


async def test_engine_that_is_killed_comes_back(server: Server, client: openai.AsyncOpenAI) -> None:
    for _ in range(5):
        stream = await client.chat.completions.create(
            model="demo", messages=QUESTION, stream=True, max_tokens=900, extra_body={"ignore_eos": True}
        )
        await anext(aiter(stream))
        os.kill(server.engine(), signal.SIGKILL)
        with pytest.raises(openai.APIError):
            _ = [chunk async for chunk in stream]
        started = time.monotonic()
        text, _, _ = await streamed(client, QUESTION, temperature=0, max_tokens=8)
        assert text
        assert time.monotonic() - started < 10


async def test_health(server: Server) -> None:
    def health() -> Any:
        with urllib.request.urlopen(server.url + "/health", timeout=10) as answer:
            return json.load(answer)

    assert (await asyncio.to_thread(health)) == {"status": "ok"}


async def test_model_that_cannot_be_read_ends_the_server(tmp_path: Path) -> None:
    """The engine process fails after the web server has started: one line, exit code 1."""
    folder = write_tiny_model(tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    name = next(n for n in tensors if n.endswith("q_proj.weight"))
    save_file({**tensors, name: np.full_like(tensors[name], np.nan)}, folder / "model.safetensors")
    command = [sys.executable, "-m", "lmdeploy", "serve", "api_server", str(folder), "--server-port", "0"]
    done = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert "q_proj" in done.stderr


async def test_server_process_keeps_to_its_share_of_the_plan(
    server: Server, client: openai.AsyncOpenAI
) -> None:
    """Also with a body of nearly the largest size; what is not about bodies is not planned far too large."""
    frontend = server_bytes(49152) - 2 * MAX_BODIES
    await client.chat.completions.create(model="demo", messages=QUESTION, max_tokens=2)
    assert 0.5 * frontend <= anonymous_bytes(server.process.pid) <= frontend
    long: Any = [{"role": "user", "content": "word " * (MAX_BODIES // 5 - 1000)}]
    for _ in range(2):
        with pytest.raises(openai.BadRequestError, match="context length"):
            await client.chat.completions.create(model="demo", messages=long, max_tokens=2)
    assert peak_bytes(server.process.pid) <= server_bytes(49152) + FILES


FILES = 40 << 20  # bytes of libraries that are mapped from files: the plan counts them with the engine


def peak_bytes(pid: int) -> int:
    """Largest resident memory the process ever had."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) * 1024
