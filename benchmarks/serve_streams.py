"""Streams of our server and of llama.cpp's on the same GGUF file, in alternating turns.

    python benchmarks/serve_streams.py [--model FILE.gguf] [--streams 8] [--requests 24]
    python benchmarks/serve_streams.py --llama-server PATH

Both servers run at the same time and idle in turns; each turn sends the same number of requests with prompts
of its own, `--streams` at once. Prints output tokens per second and, over all requests, the time to the first
token and the time per token after it, each as median and 99th percentile.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from measure.arguments import described, model_path, positive
from measure.demo import demo_model
from measure.machine import Watch
from measure.statistics import median

WORDS = (
    "the",
    "cat",
    "sat",
    "on",
    "a",
    "mat",
    "while",
    "rain",
    "fell",
    "over",
    "old",
    "roofs",
    "and",
    "slept",
)
START_SECONDS = 180.0


@dataclass(frozen=True, slots=True)
class Stream:
    """Of one request: seconds to its first token, seconds from there to its last, and tokens."""

    first: float
    rest: float
    tokens: int


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def ours(args: argparse.Namespace, port: int) -> list[str]:
    limits = [
        "--session-len",
        "1024",
        "--max-batch-size",
        str(args.streams),
        "--cache-max-entry-count",
        "0.05",
    ]
    place = ["--server-name", "127.0.0.1", "--server-port", str(port), "--num-threads", str(args.threads)]
    return [sys.executable, "-m", "lmdeploy", "serve", "api_server", str(args.model), *limits, *place]


def llama(args: argparse.Namespace, port: int) -> list[str]:
    context = ["--parallel", str(args.streams), "-c", str(1024 * args.streams), "--cache-ram", "0"]
    place = ["--host", "127.0.0.1", "--port", str(port), "-t", str(args.threads)]
    return [str(args.llama_server), "-m", str(args.model), *context, *place]


@contextmanager
def server(command: list[str], port: int) -> Iterator[str]:
    """Its address, when it answers. SystemExit with its last line when it does not."""
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
        try:
            end = time.monotonic() + START_SECONDS
            while not _healthy(port):
                if process.poll() is not None or time.monotonic() > end:
                    log.seek(0)
                    sys.exit(f"{command[0]} did not start: {(log.read().strip().splitlines() or ['?'])[-1]}")
                time.sleep(0.2)
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()


def _healthy(port: int) -> bool:
    try:
        return httpx.get(f"http://127.0.0.1:{port}/health", timeout=2).status_code == 200
    except httpx.HTTPError:
        return False


async def one(client: httpx.AsyncClient, url: str, prompt: str, tokens: int) -> Stream:
    body = {"model": (await _model(client, url)), "prompt": prompt, "max_tokens": tokens, "stream": True}
    body |= {"temperature": 0, "ignore_eos": True}
    begin, first, last, count = time.perf_counter(), 0.0, 0.0, 0
    async with client.stream("POST", f"{url}/v1/completions", json=body) as response:
        response.raise_for_status()
        async for line in response.aiter_lines():
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            event: dict[str, Any] = json.loads(line[6:])
            if event.get("choices") and event["choices"][0].get("text"):
                last = time.perf_counter() - begin
                first = first or last
                count += 1
    return Stream(first, last - first, count)


async def _model(client: httpx.AsyncClient, url: str) -> str:
    return str((await client.get(f"{url}/v1/models")).json()["data"][0]["id"])


async def turn(url: str, args: argparse.Namespace, source: random.Random) -> tuple[list[Stream], float]:
    """Streams of one turn and its seconds."""
    gate = asyncio.Semaphore(args.streams)
    prompts = [" ".join(source.choices(WORDS, k=args.prompt_words)) for _ in range(args.requests)]
    async with httpx.AsyncClient(timeout=600) as client:

        async def next_one(prompt: str) -> Stream:
            async with gate:
                return await one(client, url, prompt, args.tokens)

        begin = time.perf_counter()
        streams = await asyncio.gather(*(next_one(prompt) for prompt in prompts))
        return list(streams), time.perf_counter() - begin


def quantile(values: list[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(int(share * len(ordered)), len(ordered) - 1)]


def line(name: str, turns: list[tuple[list[Stream], float]], tokens: int) -> str:
    streams = [stream for found, _ in turns for stream in found]
    rate = median([len(found) * tokens / seconds for found, seconds in turns])
    first = [1e3 * s.first for s in streams]
    each = [1e3 * s.rest / max(tokens - 1, 1) for s in streams]
    cells = (f"{median(x):.0f} / {quantile(x, 0.99):.0f}" for x in (first, each))
    return f"| {name} | {rate:.0f} | " + " | ".join(cells) + " |"


def main() -> None:
    parser = described(__doc__)
    parser.add_argument("--model", type=model_path, help="GGUF file; the demo model when left out")
    parser.add_argument("--llama-server", type=Path)
    parser.add_argument("--streams", type=positive, default=8)
    parser.add_argument("--requests", type=positive, default=24, help="of a turn")
    parser.add_argument("--prompt-words", type=positive, default=100)
    parser.add_argument("--tokens", type=positive, default=64)
    parser.add_argument("--rounds", type=positive, default=3)
    parser.add_argument("--threads", type=positive, default=2)
    args = parser.parse_args()
    args.model = args.model or demo_model()
    commands = {"lmdeploy": ours} | ({"llama-server": llama} if args.llama_server else {})
    watch, source = Watch(), random.Random(0)
    turns: dict[str, list[tuple[list[Stream], float]]] = {name: [] for name in commands}
    with ExitStack() as stack:
        urls = {}
        for name, command in commands.items():
            port = free_port()
            urls[name] = stack.enter_context(server(command(args, port), port))
        for number in range(args.rounds):
            for name in list(urls)[:: -1 if number % 2 else 1]:
                turns[name].append(asyncio.run(turn(urls[name], args, source)))
    print(f"{args.streams} streams of {args.tokens} tokens, {args.model.name}, {args.threads} threads\n")
    print("| server | output tokens/s | ms to the first token: median / 99 % | ms a token after it |")
    print("|---|---|---|---|")
    print("\n".join(line(name, found, args.tokens) for name, found in turns.items()))
    print(f"\nothers took {watch.others():.1%} of the CPU")


if __name__ == "__main__":
    main()
