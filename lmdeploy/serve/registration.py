"""Tells a proxy that this server is there, and when it goes.

Owns the address the proxy is told and how often: again and again, so that a restarted proxy knows the
server soon. What the proxy does with it is its own business; without one this server serves on.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Sequence

import msgspec

from lmdeploy.serve.launch import Backend, Listener
from lmdeploy.serve.proxy.upstream import Upstream, UpstreamError

logger = logging.getLogger("lmdeploy.serve")

RENEW_SECONDS = 10.0
_ANSWER_SECONDS = 10.0


class Registration:
    """One server at one proxy. Raises ConfigError for a URL that is none."""

    def __init__(self, proxy_url: str, listener: Listener, port: int, key: str | None = None) -> None:
        self._proxy_url = proxy_url
        self._proxy = Upstream(proxy_url)
        self._listener = listener
        self._port = port
        self._headers = [(b"content-type", b"application/json")]
        if key is not None:
            self._headers.append((b"authorization", f"Bearer {key}".encode()))
        self._said = ""

    async def keep(self, models: Sequence[str]) -> None:
        """Register with the names of its models, and renew it until cancelled."""
        renew = False
        while True:
            body = {"status": {"models": list(models), "role": "Hybrid"}, "renew": renew}
            renew = await self._tell("/nodes/add", body) or renew
            await asyncio.sleep(RENEW_SECONDS)

    async def end(self) -> None:
        """The proxy sends nothing more."""
        await self._tell("/nodes/remove", {})
        self._proxy.abort("the server ends")

    async def _tell(self, path: str, body: dict[str, object]) -> bool:
        """Whether the proxy took it; what stands in the way is logged once."""
        try:
            problem = await asyncio.wait_for(self._post(path, body), _ANSWER_SECONDS)
        except UpstreamError as error:
            problem = str(error)
        except asyncio.TimeoutError:
            problem = f"no answer within {_ANSWER_SECONDS:g} s"
        if problem and problem != self._said:
            logger.warning("proxy %s: %s", self._proxy_url, problem)
        self._said = problem
        return not problem

    async def _post(self, path: str, body: dict[str, object]) -> str:
        raw = msgspec.json.encode({"url": await self._own_url(), **body})
        async with await self._proxy.send("POST", path, self._headers, raw) as answer:
            said = (await answer.read()).decode(errors="replace")
        return "" if answer.status == 200 else f"it answers {answer.status}: {said[:300]}"

    async def _own_url(self) -> str:
        """The address to listen on; the one that the proxy is reached from where that is every address."""
        host = self._listener.host
        if host in ("0.0.0.0", "::", ""):
            host = await asyncio.to_thread(_address_towards, self._proxy.host, self._proxy.port)
        name = f"[{host}]" if ":" in host else host
        return f"{'https' if self._listener.ssl_keyfile else 'http'}://{name}:{self._port}"


def _address_towards(host: str, port: int) -> str:
    """This machine's address on the way to `host`. Raises UpstreamError where there is none."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as sock:
            sock.connect(address)  # of datagrams: nothing is sent
            found: str = sock.getsockname()[0]
            return found
    except OSError as error:
        raise UpstreamError(f"no way to it: {error.strerror or error}", sent=False) from None


class Registered:
    """A backend that is known to a proxy from its start to the beginning of its end."""

    def __init__(self, inner: Backend, registration: Registration, models: Sequence[str]) -> None:
        self._inner = inner
        self._models = models
        self._registration = registration
        self._keeping: asyncio.Task[None] | None = None

    @property
    def draining(self) -> bool:
        return self._inner.draining

    @draining.setter
    def draining(self, value: bool) -> None:
        self._inner.draining = value

    async def start(self) -> None:
        await self._inner.start()
        self._keeping = asyncio.get_running_loop().create_task(self._registration.keep(self._models))

    async def drain(self, seconds: float) -> None:
        await self._stop()
        await self._inner.drain(seconds)

    async def close(self) -> None:
        await self._stop()
        await self._inner.close()

    async def _stop(self) -> None:
        if self._keeping is not None:
            keeping, self._keeping = self._keeping, None
            keeping.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await keeping
            await self._registration.end()
