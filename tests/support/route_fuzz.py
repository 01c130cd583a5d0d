"""Broken requests of every kind for all routes of a server, and what an answer to them may be.

Used by the tests for some seconds and by benchmarks/fuzz_routes.py for minutes.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections import Counter
from typing import Any

import httpx

VALUES: list[Any] = [None, True, False, 0, 1, -1, 2**31, 2**63, -(2**63), 10**30, 0.5, -0.0, 1e300, "", "x"]
VALUES += [
    "5",
    "\x00",
    "\U0001f469",
    "x" * 5000,
    [],
    {},
    [1],
    ["a"],
    [[]],
    [None],
    {"a": 1},
    {"1": 1},
    [[1], "a"],
]
VALUES += [{"role": "user"}, [{"role": "user", "content": "q"}], {"type": "json_object"}, {"type": "x"}]
GOOD: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2},
    "/v1/completions": {"prompt": "hi", "max_tokens": 2},
    "/v1/responses": {"input": "hi", "max_output_tokens": 2},
    "/v1/messages": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2},
    "/v1/messages/count_tokens": {"messages": [{"role": "user", "content": "hi"}]},
    "/generate": {"prompt": "hi", "max_tokens": 2},
    "/get_ppl": {"input": "hello"},
    "/tokenize": {"prompt": "hi"},
    "/detokenize": {"tokens": [65]},
    "/v1/encode": {"input": "hi"},
    "/v1/embeddings": {"input": "hi"},
    "/pooling": {"input": "hi"},
    "/abort_request": {"request_id": "none"},
}
RAW = [b"", b"{", b"[]", b"null", b"\xff\xfe", b'{"model": "\xff"}', b'{"a": "\\ud800"}', b"[" * 100_000]
RAW += [
    b'{"a":' * 100_000,
    b"9" * 100_000,
    b"1e999999",
    b'{"max_tokens": 1e400}',
    b'"' + b"x" * 100_000,
    b"\x00",
]
ALLOWED = {200, 400, 404, 405, 413, 415, 429, 499}  # 499: another one aborted all


class BrokenError(AssertionError):
    """The server gave an answer that no request may get."""


class Fuzz:
    """Sends for `seconds`; `counts` are the statuses by route. The server must be good at the end, too."""

    def __init__(self, url: str, seed: int) -> None:
        self.url = url
        self.counts: Counter[tuple[str, int]] = Counter()
        self._draw = random.Random(seed)
        self._fields: dict[str, list[str]] = {}

    async def run(self, seconds: float, workers: int = 4) -> None:
        """Raises BrokenError with the request that was answered wrongly."""
        deadline = time.monotonic() + seconds
        async with httpx.AsyncClient(base_url=self.url, timeout=60) as http:
            document = (await http.get("/openapi.json")).json()
            for path in GOOD:
                content = document["paths"][path]["post"]["requestBody"]["content"]
                self._fields[path] = sorted(content["application/json"]["schema"]["properties"])
            await asyncio.gather(*(self._work(http, deadline) for _ in range(workers)))
            assert (await http.get("/health")).json() == {"status": "ok"}
            for path in GOOD:
                if path not in ("/v1/embeddings", "/pooling"):
                    answer = await http.post(path, json=GOOD[path])
                    assert answer.status_code == 200, (path, answer.text)

    async def _work(self, http: httpx.AsyncClient, deadline: float) -> None:
        kinds = [self._odd_fields] * 6 + [self._raw, self._nested, self._header, self._half_sent]
        while time.monotonic() < deadline:
            path = self._draw.choice(list(GOOD))
            await self._draw.choice(kinds)(http, path)

    async def _odd_fields(self, http: httpx.AsyncClient, path: str) -> None:
        names = self._draw.sample(
            self._fields[path], min(len(self._fields[path]), self._draw.choice([1, 1, 2, 4]))
        )
        body = {**GOOD[path], **{name: self._draw.choice(VALUES) for name in names}}
        await self._post(http, path, json.dumps(body).encode())

    async def _raw(self, http: httpx.AsyncClient, path: str) -> None:
        body = self._draw.choice(RAW)
        if self._draw.random() < 0.5:  # a good body with a few bytes changed
            whole = bytearray(json.dumps(GOOD[path]).encode())
            for _ in range(self._draw.randint(1, 3)):
                whole[self._draw.randrange(len(whole))] = self._draw.randrange(256)
            body = bytes(whole)
        await self._post(http, path, body)

    async def _nested(self, http: httpx.AsyncClient, path: str) -> None:
        name, depth = self._draw.choice(self._fields[path]), self._draw.choice([50, 150, 1000, 20_000])
        left, right = self._draw.choice([("[", "]"), ('{"a":', "}"), ('[{"content":', "}]")])
        good = json.dumps({k: v for k, v in GOOD[path].items() if k != name})[:-1]
        comma = ", " if good != "{" else ""
        text = f'{good}{comma}"{name}": {left * depth}1{right * depth}}}'
        await self._post(http, path, text.encode())

    async def _header(self, http: httpx.AsyncClient, path: str) -> None:
        headers = self._draw.choice(
            [
                {"content-type": "text/plain"},
                {"content-type": "application/json; charset=latin-1"},
                {"x-request-id": "a" * 300},
                {"authorization": "Basic \xff"},
                {"accept": "image/png"},
            ]
        )
        encoded = {name: value.encode("latin-1") for name, value in headers.items()}
        await self._post(http, path, json.dumps(GOOD[path]).encode(), encoded)

    async def _post(
        self, http: httpx.AsyncClient, path: str, body: bytes, headers: dict[str, bytes] | None = None
    ) -> None:
        kind = {"content-type": b"application/json", **(headers or {})}
        answer = await http.post(path, content=body, headers=kind)
        self.counts[path, answer.status_code] += 1
        if answer.status_code not in ALLOWED:
            raise BrokenError(f"{path} answered {answer.status_code}: {answer.text[:500]} to {body[:1000]!r}")
        if answer.status_code >= 400:
            error = answer.json()["error"]
            if not isinstance(error["message"], str) or len(error["message"]) > 2000:
                raise BrokenError(f"{path}: {answer.text[:3000]} to {body[:1000]!r}")

    async def _half_sent(self, http: httpx.AsyncClient, path: str) -> None:
        """A body that stops in the middle, slowly sent; the client leaves without waiting."""
        body = json.dumps(GOOD[path]).encode()
        host, port = self.url.removeprefix("http://").split(":")
        _, writer = await asyncio.open_connection(host, int(port))
        head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        writer.write(head.encode() + f"content-length: {len(body) + 5}\r\n\r\n".encode())
        for byte in body[: self._draw.randint(0, 5)]:
            writer.write(bytes([byte]))
            await writer.drain()
            await asyncio.sleep(0.02)
        writer.close()
        self.counts[path, 0] += 1
