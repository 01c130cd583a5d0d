"""Several models on one machine: one memory budget, one plan, before anything is loaded.

Every model's weights, workspace and process come first, the web server once; what is left is divided by the
shares, and each model's cache gets `cache_max_entry_count` of its part. A cache that needs less, because
max_batch_size binds first, leaves the rest to the others. Reads headers and never a weight.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from lmdeploy.config import EngineConfig
from lmdeploy.errors import CapacityError
from lmdeploy.models.hub import model_name
from lmdeploy.runtime.machine import Machine, read_machine
from lmdeploy.runtime.memory_plan import MAX_BODIES, Needs, server_bytes, size
from lmdeploy.runtime.resolve import SERVER_QUEUE, RuntimeConfig, footprint, resolve
from lmdeploy.speculative import SpeculativeConfig


@dataclass(frozen=True, slots=True)
class Wanted:
    """One of the models. share: of the memory that is left for caches, relative to the others' shares."""

    model: str
    config: EngineConfig
    speculative: SpeculativeConfig | None = None
    share: float = 1.0


@dataclass(frozen=True, slots=True)
class Together:
    """The plan. Bytes; `free` is what could be divided, bounded by `bound`."""

    configs: tuple[RuntimeConfig, ...]
    server: int
    free: int
    bound: str

    @property
    def total(self) -> int:
        return self.server + sum(config.plan.total for config in self.configs if config.device == "cpu")


def resolve_together(
    wanted: Sequence[Wanted],
    *,
    memory: int | None = None,
    bodies: int = MAX_BODIES,
    machine: Machine | None = None,
) -> Together:
    """Make every choice concrete for all of them. Raises ConfigError, CapacityError and ModelError.

    memory: bytes that all may take, less than what is free. bodies: of requests, held at once by the server.
    """
    machine = machine or read_machine()
    # What this process has taken is part of the server's share, which is planned as a whole.
    free, bound = machine.memory_free + machine.own_memory, machine.memory_bound
    if memory is not None:
        if memory > free:
            raise CapacityError(
                f"a memory budget of {size(memory)} is more than the {size(free)} that are free"
            )
        free, bound = memory, "the memory budget"
    feet = [footprint(w.model, w.config, speculative=w.speculative, machine=machine) for w in wanted]
    if any(foot.device != "cpu" for foot in feet):
        raise CapacityError(
            "several models share the memory of the CPU only: give each of them `backend: turbomind`, or "
            "serve one model on the card"
        )
    server = server_bytes(sum(foot.vocab_size for foot in feet), bodies)
    fixed = [_fixed(foot.needs) for foot in feet]
    room = free - server - sum(fixed)
    if room <= 0:
        raise CapacityError(_too_much(wanted, fixed, server, free))
    return Together(_shared_out(wanted, fixed, room, machine), server, free, bound)


def _fixed(needs: Needs) -> int:
    """Bytes a model takes without its cache."""
    return needs.process + needs.weights + needs.workspace + needs.draft


def _shared_out(
    wanted: Sequence[Wanted], fixed: Sequence[int], room: int, machine: Machine
) -> tuple[RuntimeConfig, ...]:
    """A model that max_batch_size bounds takes what it needs; the room is divided anew among the others."""
    configs: dict[int, RuntimeConfig] = {}
    open_ = list(range(len(wanted)))
    while open_:
        shares = sum(wanted[i].share for i in open_)
        parts = {i: int(room * wanted[i].share / shares) for i in open_}
        configs |= {i: _planned(wanted[i], fixed[i] + parts[i], parts[i], machine) for i in open_}
        satisfied = [i for i in open_ if configs[i].plan.bound == "max_batch_size"]
        if not satisfied or len(satisfied) == len(open_):
            break
        for i in satisfied:
            room -= _used(configs[i], wanted[i])
            open_.remove(i)
    return tuple(configs[i] for i in range(len(wanted)))


def _used(config: RuntimeConfig, wanted: Wanted) -> int:
    """What of the room a model's cache takes, with what must stay free beside it."""
    return int(config.plan.kv_pool / wanted.config.cache_max_entry_count)


def _planned(wanted: Wanted, free: int, part: int, machine: Machine) -> RuntimeConfig:
    own = dataclasses.replace(machine, memory_free=free, own_memory=0)
    config = wanted.config
    if config.max_queued_requests is None:
        config = dataclasses.replace(config, max_queued_requests=SERVER_QUEUE)
    try:
        return resolve(wanted.model, config, speculative=wanted.speculative, machine=own)
    except CapacityError as error:
        raise CapacityError(
            f"{model_name(wanted.model)}, whose cache may have its share {wanted.share:g} of what all models "
            f"leave, {size(part)}: {error.message}",
            param=error.param,
        ) from None


def _too_much(wanted: Sequence[Wanted], fixed: Sequence[int], server: int, free: int) -> str:
    parts = [f"{model_name(w.model)} {size(taken)}" for w, taken in zip(wanted, fixed, strict=True)]
    return (
        f"the models do not fit together: without any cache {', '.join(parts)} and the server {size(server)} "
        f"take {size(server + sum(fixed))}, but {size(free)} are free; serve fewer or smaller models, or "
        "lower max_batch_size or max_prefill_token_num"
    )


def together_table(together: Together, names: Sequence[str]) -> str:
    """The start-up account of all models for people."""
    rows: list[tuple[str, ...]] = [
        ("model", "weights", "workspace", "process", "KV cache", "in all", "at once")
    ]
    for name, config in zip(names, together.configs, strict=True):
        plan = config.plan
        at_once = f"{plan.sequences} of {plan.session_len} tokens, limited by {plan.bound}"
        sizes = (plan.weights + plan.draft, plan.workspace, plan.process, plan.kv_pool, plan.total)
        rows.append((name, *map(size, sizes), at_once))
    rows.append(("web server", "", "", "", "", size(together.server), ""))
    where = "" if together.bound == "machine" else f" ({together.bound})"
    rows.append(("in all", "", "", "", "", size(together.total), f"of {size(together.free)} free{where}"))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]) - 1)]
    lines = [_line(row, widths) for row in rows]
    for name, config in zip(names, together.configs, strict=True):
        lines.append(f"{name}: {config.family}; {config.engine}; {config.limits.num_threads} threads")
        lines += [f"{name}: {note}" for note in (*config.notes, *config.cautions)]
    return "\n".join(lines)


def _line(row: Sequence[str], widths: Sequence[int]) -> str:
    first, *middle = (
        row[0].ljust(widths[0]),
        *(t.rjust(w) for t, w in zip(row[1:-1], widths[1:], strict=True)),
    )
    return "  ".join((first, *middle, row[-1])).rstrip()
