"""The servers behind the proxy: which there are, what they serve and how they are.

Owns the table that /nodes/* changes and reads. Which of them gets a request is decided in `routing`, how they
are found to be well in `health`.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from lmdeploy.errors import EngineDeadError, ModelNotServedError
from lmdeploy.serve.proxy.upstream import Upstream

_REMEMBERED = 1000  # removed nodes
_LATENCIES = 15  # answers that an observed latency is the mean of


class Health(str, Enum):
    """What the last probe or request said of a node."""

    UNKNOWN = "unknown"  # not asked yet
    READY = "ready"
    NOT_READY = "not ready"  # it answers, but takes no requests: loading, draining, engine restarting
    DOWN = "down"  # it does not answer


@dataclass(slots=True, eq=False)
class Node:
    """One server. `cards`: its entries of /v1/models; `speed`: relative, as declared."""

    url: str
    upstream: Upstream
    declared: tuple[str, ...] = ()  # models named at its registration, until it has listed its own
    speed: float = 1.0
    role: str = "Hybrid"
    cards: tuple[dict[str, Any], ...] = ()
    health: Health = Health.UNKNOWN
    problem: str = ""
    missed: int = 0  # probes without an answer, one after the other
    unfinished: int = 0
    answered: int = 0
    failed: int = 0  # requests that it did not answer, or not completely
    latencies: deque[float] = field(default_factory=lambda: deque(maxlen=_LATENCIES))

    @property
    def models(self) -> tuple[str, ...]:
        return tuple(card["id"] for card in self.cards) or self.declared

    def serves(self, model: str) -> bool:
        return model in self.models or any(card.get("root") == model for card in self.cards)

    @property
    def load(self) -> float:
        """Requests it holds, in the time they take."""
        return self.unfinished / self.speed

    @property
    def latency(self) -> float:
        """Mean seconds of the last answers; 0 without any, so that a new node is tried."""
        return sum(self.latencies) / len(self.latencies) if self.latencies else 0.0

    @contextmanager
    def holding(self) -> Iterator[None]:
        """While it works on a request."""
        began = time.monotonic()
        self.unfinished += 1
        try:
            yield
            self.answered += 1
            self.latencies.append(time.monotonic() - began)
        finally:
            self.unfinished -= 1

    def status(self) -> dict[str, Any]:
        return {
            "models": list(self.models),
            "role": self.role,
            "speed": self.speed,
            "unfinished": self.unfinished,
            "latency": [round(seconds, 4) for seconds in self.latencies],
            "health": self.health.value,
            "problem": self.problem,
            "answered": self.answered,
            "failed": self.failed,
        }


class Nodes:
    """The table of nodes, by URL."""

    def __init__(self) -> None:
        self._nodes: dict[str, Node] = {}
        self._removed: dict[str, None] = {}  # those that must not come back by renewing themselves

    def __iter__(self) -> Iterator[Node]:
        return iter(tuple(self._nodes.values()))

    def __len__(self) -> int:
        return len(self._nodes)

    def get(self, url: str) -> Node | None:
        return self._nodes.get(url.rstrip("/"))

    def add(self, url: str, models: Sequence[str] = (), speed: float | None = None) -> Node:
        """The node at `url`, new or known; what is said of it replaces what was said. Raises ConfigError."""
        url = url.rstrip("/")
        self._removed.pop(url, None)
        node = self._nodes.get(url)
        if node is None:
            node = self._nodes[url] = Node(url, Upstream(url))
        node.declared = tuple(models) or node.declared
        node.speed = speed or node.speed
        return node

    def remove(self, url: str) -> Node | None:
        """It gets no more requests; those it works on are finished."""
        node = self._nodes.pop(url.rstrip("/"), None)
        if node is not None:
            self._removed[node.url] = None
            for old in list(self._removed)[:-_REMEMBERED]:
                del self._removed[old]
        return node

    def was_removed(self, url: str) -> bool:
        return url.rstrip("/") in self._removed

    def cards(self) -> list[dict[str, Any]]:
        """One entry of /v1/models for each model that a node could answer for."""
        found: dict[str, dict[str, Any]] = {}
        for node in self:
            if node.health is not Health.DOWN:
                for card in node.cards or (_bare_card(name) for name in node.declared):
                    found.setdefault(card["id"], card)
        return list(found.values())

    def candidates(self, model: str | None, tried: Iterable[Node] = ()) -> list[Node]:
        """Nodes that may get a request for `model`. Raises ModelNotServedError and EngineDeadError."""
        if not self._nodes:
            raise EngineDeadError("No server is registered at this proxy; see POST /nodes/add.")
        serving = [node for node in self if model is None or node.serves(model)]
        if not serving:
            raise self._unknown(str(model))
        skipped = set(tried)
        usable = [n for n in serving if n.health in (Health.READY, Health.UNKNOWN) and n not in skipped]
        if not usable:
            raise EngineDeadError("None of the servers for this model can take a request now.")
        return usable

    def _unknown(self, model: str) -> ModelNotServedError | EngineDeadError:
        if any(not node.models for node in self):  # it may be the one
            return EngineDeadError(f"No server that can be reached serves the model `{model[:200]}`.")
        listed = ", ".join(sorted({f"`{name}`" for node in self for name in node.models}))
        return ModelNotServedError(
            f"The model `{model[:200]}` does not exist; the servers of this proxy answer to {listed}.",
            param="model",
        )


def _bare_card(name: str) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": 0, "owned_by": "lmdeploy", "root": name, "parent": None}
