"""Asks every node now and then whether it is well and what it serves.

Owns what follows from an answer and from none. Knows the routes /health and /v1/models, which every
OpenAI-compatible server has at least one of.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import msgspec

from lmdeploy.serve.proxy.forward import Proxy
from lmdeploy.serve.proxy.nodes import Health, Node
from lmdeploy.serve.proxy.upstream import Headers, UpstreamError

logger = logging.getLogger("lmdeploy.serve.proxy")

PROBE_SECONDS = 5.0
_MISSES = 3  # probes without an answer after which all that waits for the node is given to others


async def watch(proxy: Proxy, interval: float) -> None:
    """Probe all nodes every `interval` seconds, until cancelled."""
    while True:
        await asyncio.gather(*(probe(proxy, node) for node in proxy.nodes))
        await asyncio.sleep(interval)


async def probe(proxy: Proxy, node: Node) -> None:
    """Ask one node; what it is found to be is written into it."""
    before = node.health
    try:
        await asyncio.wait_for(_ask(node, proxy.own_headers()), PROBE_SECONDS)
        node.missed = 0
    except (UpstreamError, asyncio.TimeoutError) as error:
        node.missed += 1
        refused = isinstance(error, UpstreamError) and not error.sent
        node.problem = str(error) or f"no answer within {PROBE_SECONDS:g} s"
        if refused or node.missed >= _MISSES or before is Health.UNKNOWN:
            node.health = Health.DOWN
        if node.missed >= _MISSES:
            node.upstream.abort(node.problem)
    if node.health is not before:
        level = logging.INFO if node.health is Health.READY else logging.WARNING
        logger.log(level, "%s is %s %s", node.url, node.health.value, node.problem)


async def _ask(node: Node, headers: Headers) -> None:
    async with await node.upstream.send("GET", "/health", headers) as answer:
        await answer.read()
        status = answer.status
    if status >= 500:
        node.health, node.problem = Health.NOT_READY, f"/health answers {status}"
        return
    cards = await _models(node, headers)
    if cards is not None:
        node.cards = cards
    if node.models:
        node.health, node.problem = Health.READY, ""
    else:
        node.health, node.problem = Health.NOT_READY, "it lists no model; does it want a key?"


async def _models(node: Node, headers: Headers) -> tuple[dict[str, Any], ...] | None:
    """None where it does not say."""
    async with await node.upstream.send("GET", "/v1/models", headers) as answer:
        body = await answer.read()
    try:
        cards = msgspec.json.decode(body)["data"] if answer.status == 200 else None
        return None if cards is None else tuple(c for c in cards if isinstance(c["id"], str))
    except (msgspec.MsgspecError, KeyError, TypeError):
        return None
