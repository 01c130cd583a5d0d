"""Which node gets a request: four strategies over the nodes that could take it.

Owns the memory of which node has seen which beginnings. Reads a request's body only for its model and its
beginning; knows no other field.
"""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import accumulate
from typing import Any

import msgspec

from lmdeploy.errors import ConfigError
from lmdeploy.serve.proxy.nodes import Node

STRATEGIES = ("prefix_aware", "min_expected_latency", "min_observed_latency", "random")
_BLOCK = 256  # bytes of a request that are remembered together, about as many as a cache block has tokens
_BLOCKS = 256  # of one request: what follows makes no difference to where it goes
_REMEMBERED = 1 << 18  # blocks of all requests
_SLACK = 4  # requests that a node may hold more than the least loaded one and still get those it has seen


class _Fields(msgspec.Struct):
    """What is read of a body; all else is left as it is."""

    model: Any = None
    cache_salt: msgspec.Raw = msgspec.Raw()
    tools: msgspec.Raw = msgspec.Raw()
    system: msgspec.Raw = msgspec.Raw()
    instructions: msgspec.Raw = msgspec.Raw()
    messages: msgspec.Raw = msgspec.Raw()
    input: msgspec.Raw = msgspec.Raw()
    input_ids: msgspec.Raw = msgspec.Raw()
    prompt: msgspec.Raw = msgspec.Raw()

    def prefix(self) -> bytes:
        """What a model would read, in the order of reading."""
        parts = (self.tools, self.system, self.instructions, self.messages, self.input, self.input_ids)
        return b"".join(bytes(part)[: _BLOCK * _BLOCKS] for part in (*parts, self.prompt))


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a body asks for: its model, None where it names none, and the digests of its beginnings."""

    model: str | None = None
    digests: tuple[bytes, ...] = ()


_decode = msgspec.json.Decoder(_Fields).decode


def wanted(body: bytes | bytearray) -> Wanted:
    """Of a body that is no JSON object nothing is known: whichever node gets it will say what is wrong."""
    try:
        fields = _decode(body)
    except (msgspec.MsgspecError, RecursionError):
        return Wanted()
    model = fields.model if isinstance(fields.model, str) else None
    root = f"{model} ".encode() + bytes(fields.cache_salt)[:_BLOCK]
    return Wanted(model, tuple(_digests(root, fields.prefix())))


def _digests(root: bytes, text: bytes) -> Iterable[bytes]:
    """One for each whole block, of everything up to its end."""
    count = min(len(text) // _BLOCK, _BLOCKS)
    blocks = (text[i * _BLOCK : (i + 1) * _BLOCK] for i in range(count))
    chain = accumulate(
        blocks, lambda before, block: blake2b(before + block, digest_size=16).digest(), initial=root
    )
    return list(chain)[1:]


class Router:
    """One strategy. Raises ConfigError for a name that is none."""

    def __init__(self, strategy: str, seed: int | None = None) -> None:
        if strategy not in STRATEGIES:
            raise ConfigError(f"--routing-strategy {strategy[:100]}: must be one of {', '.join(STRATEGIES)}")
        self._strategy = strategy
        self._random = random.Random(seed)
        self._seen: OrderedDict[bytes, Node] = OrderedDict()

    def choose(self, nodes: Sequence[Node], request: Wanted) -> Node:
        """One of `nodes`, which are not none."""
        if self._strategy == "random":
            return self._random.choices(nodes, [node.speed for node in nodes])[0]
        if self._strategy == "min_observed_latency":
            return self._least(nodes, [node.latency for node in nodes])
        least = self._least(nodes, [node.load for node in nodes])
        if self._strategy == "min_expected_latency":
            return least
        chosen = self._familiar(nodes, request, least)
        self._remember(chosen, request)
        return chosen

    def _least(self, nodes: Sequence[Node], values: Sequence[float]) -> Node:
        lowest = min(values)
        return self._random.choice([n for n, value in zip(nodes, values, strict=True) if value == lowest])

    def _familiar(self, nodes: Sequence[Node], request: Wanted, least: Node) -> Node:
        """The node that has seen the longest beginning, unless that would make it wait."""
        for digest in reversed(request.digests):
            node = self._seen.get(digest)
            if node is not None and node in nodes and node.load <= least.load + _SLACK / node.speed:
                return node
        return least

    def _remember(self, node: Node, request: Wanted) -> None:
        for digest in request.digests:
            self._seen[digest] = node
            self._seen.move_to_end(digest)
        while len(self._seen) > _REMEMBERED:
            self._seen.popitem(last=False)
