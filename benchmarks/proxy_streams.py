"""What a stream costs the proxy: CPU time of a chunk, and what it adds to the time to the first one.

    python benchmarks/proxy_streams.py [--streams 64] [--rate 50] [--seconds 8]

A server of its own sends `--streams` streams of `--rate` events a second, directly, through `lmdeploy serve
proxy`, and through a proxy that differs in its client only (httpx2, where it is installed). Server, proxy and
reader are processes of their own; the CPU time is the proxy's.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn
from measure.arguments import described, positive
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, StreamingResponse
from starlette.routing import Route

from lmdeploy.serve.proxy.upstream import Upstream

EVENT = b'data: {"id":"chatcmpl-0","choices":[{"index":0,"delta":{"content":" word"}}]}\n\n'


def serve_events(rate: float, seconds: float) -> None:
    """The server: /v1/models, /health and streams; prints its port."""

    async def events(_: Request) -> StreamingResponse:
        async def paced():  # type: ignore[no-untyped-def]
            begin = time.monotonic()
            for i in range(int(rate * seconds)):
                await asyncio.sleep(max(0.0, begin + i / rate - time.monotonic()))
                yield EVENT

        return StreamingResponse(paced(), media_type="text/event-stream")

    async def models(_: Request) -> JSONResponse:
        return JSONResponse({"object": "list", "data": [{"id": "m", "object": "model"}]})

    async def health(_: Request) -> JSONResponse:
        return JSONResponse({"status": "ok"})

    run_app([Route("/v1/chat/completions", events, methods=["POST"]), Route("/v1/models", models),
             Route("/health", health)])  # fmt: skip


def serve_with_client(node: str) -> None:
    """A proxy that only passes bytes on, with httpx2 as its client."""
    import httpx2

    client = httpx2.AsyncClient(base_url=node, timeout=None, limits=httpx2.Limits(max_connections=None))

    async def forward(request: Request) -> StreamingResponse:
        asked = client.build_request("POST", request.url.path, content=await request.body())
        answer = await client.send(asked, stream=True)
        return StreamingResponse(answer.aiter_raw(), media_type="text/event-stream")

    run_app([Route("/v1/chat/completions", forward, methods=["POST"])])


def run_app(routes: list[Route]) -> None:
    config = uvicorn.Config(Starlette(routes=routes), port=0, log_level="warning", http="httptools")
    server = uvicorn.Server(config)

    async def main() -> None:
        task = asyncio.ensure_future(server.serve())
        while not server.started:
            await asyncio.sleep(0.01)
        print(f" at http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}/v1", flush=True)
        await task

    asyncio.run(main())


@contextmanager
def running(*command: str) -> Iterator[tuple[int, str]]:
    """Process id and URL of a server that prints ` at URL/v1`."""
    process = subprocess.Popen([sys.executable, *command], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        yield process.pid, process.stdout.readline().split(" at ")[1].split("/v1")[0]
    finally:
        process.terminate()
        process.wait()


def cpu_seconds(pid: int) -> float:
    with open(f"/proc/{pid}/stat") as file:
        fields = file.read().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def read_streams(url: str, count: int) -> tuple[int, list[float]]:
    """Events that came, and the seconds to the first one of each stream."""
    upstream = Upstream(url)
    events, firsts = 0, []

    async def one() -> None:
        nonlocal events
        begin, first = time.monotonic(), True
        async with await upstream.send("POST", "/v1/chat/completions", body=b"{}") as answer:
            async for piece in answer.pieces():
                if first:
                    firsts.append(time.monotonic() - begin)
                    first = False
                events += piece.count(b"\n\n")

    await asyncio.gather(*(one() for _ in range(count)))
    return events, firsts


def measure(name: str, url: str, pid: int | None, args: argparse.Namespace) -> None:
    asyncio.run(read_streams(url, 2))
    before = cpu_seconds(pid) if pid else 0.0
    begin = time.monotonic()
    events, firsts = asyncio.run(read_streams(url, args.streams))
    seconds = time.monotonic() - begin
    used = cpu_seconds(pid) - before if pid else 0.0
    told = f"{1e6 * used / events:6.1f} us a chunk, {100 * used / seconds:5.1f} % of a core" if pid else ""
    print(
        f"{name:22} {events} chunks, first after {1e3 * statistics.median(firsts):6.1f} ms (median); {told}"
    )


def main() -> None:
    parser = described(__doc__)
    parser.add_argument("--streams", type=positive, default=64)
    parser.add_argument("--rate", type=positive, default=50)
    parser.add_argument("--seconds", type=positive, default=8)
    parser.add_argument("--role", choices=("events", "client"), help=argparse.SUPPRESS)
    parser.add_argument("--node", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.role == "events":
        return serve_events(args.rate, args.seconds)
    if args.role == "client":
        return serve_with_client(args.node)
    paced = ["--rate", str(args.rate), "--seconds", str(args.seconds)]
    with running(__file__, "--role", "events", *paced) as (_, node):
        measure("direct", node, None, args)
        proxy = ["-m", "lmdeploy", "serve", "proxy", "--server-name", "127.0.0.1", "--server-port", "0"]
        with running(*proxy, "--nodes", node) as (pid, url):
            time.sleep(1)
            measure("lmdeploy serve proxy", url, pid, args)
        with running(__file__, "--role", "client", "--node", node) as (pid, url):
            measure("the same with httpx2", url, pid, args)


if __name__ == "__main__":
    main()
