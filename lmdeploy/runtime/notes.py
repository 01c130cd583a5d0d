"""What a user is told beside the plan: what was decided for them, and where it is less than they expect.

Words only; decides nothing.
"""

from __future__ import annotations

from lmdeploy.config import EngineConfig
from lmdeploy.models.spec import ModelSpec
from lmdeploy.runtime.engine_choice import Choice
from lmdeploy.runtime.machine import Machine
from lmdeploy.runtime.memory_plan import MemoryPlan


def native_notes(kernels: str, machine: Machine) -> list[str]:
    """What makes the native engine slower here than it need be; `kernels` is "" for another engine."""
    lines = []
    if kernels == "portable":
        lines.append(
            "the portable kernels compute, which are slow: AVX2, or the dot product of ARM, is missing or was"
            " turned off"
        )
    if kernels and machine.huge_pages.transparent in ("never", "absent"):
        lines.append(
            "memory comes in small pages, which is slower: transparent huge pages are"
            f" {machine.huge_pages.transparent} (/sys/kernel/mm/transparent_hugepage/enabled)"
        )
    return lines


def notes(config: EngineConfig, plan: MemoryPlan, spec: ModelSpec) -> tuple[str, ...]:
    lines = []
    if config.session_len is None and plan.session_len == spec.max_position:
        lines.append(f"session_len is {plan.session_len}, the model's own")
    ropes = {layer.attention.rope for layer in spec.layers}
    for kind in sorted({rope.kind for rope in ropes if rope and rope.depends_on_length}):
        lines.append(
            f"{kind} positions are those of sequences of {plan.session_len} tokens, for every request"
        )
    return tuple(lines)


def cautions(
    config: EngineConfig,
    plan: MemoryPlan,
    spec: ModelSpec,
    num_threads: int,
    machine: Machine,
    choice: Choice,
) -> tuple[str, ...]:
    lines = [choice.note] if choice.note else []
    if config.session_len is None and plan.session_len < spec.max_position:
        lines.append(
            f"session_len is {plan.session_len}, the largest that fits in memory; "
            f"the model's own is {spec.max_position}"
        )
    if num_threads > machine.logical_cpus:
        lines.append(f"{num_threads} threads share {machine.logical_cpus} CPUs: fewer would be faster")
    return tuple(lines)
