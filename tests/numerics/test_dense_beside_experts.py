"""Dense layers of a model with experts are described, counted and computed; the experts are refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from executors import make_torch
from native_case import make_executor, relative_rms, sequence_logits
from native_llama import llama

from lmdeploy.errors import ModelError
from lmdeploy.models.reference import Decoder
from lmdeploy.models.spec import ModelSpec

MAKE = {"turbomind": make_executor, "pytorch": make_torch}
IDS = np.random.default_rng(3).integers(0, 130, 40).astype(np.int32)


def with_experts_behind(spec: ModelSpec) -> ModelSpec:
    """The first layer dense, the others with experts, as first_k_dense_replace = 1 means."""
    first, *others = spec.layers
    return replace(spec, layers=(first, *(replace(x, ffn=replace(x.ffn, kind="experts")) for x in others)))


def test_dense_layers_are_described_beside_experts() -> None:
    _, spec, _ = llama()
    mixed = with_experts_behind(spec)
    assert list(mixed.linears(0)) == list(spec.linears(0))
    assert [x.name for x in mixed.linears(1)] == [f"layers.1.attn.{x}_proj" for x in "qkvo"]
    missing = dict(spec.tensors()).keys() - dict(mixed.tensors()).keys()
    assert missing == {
        f"layers.{i}.ffn.{x}_proj.weight" for i in range(1, len(spec.layers)) for x in ("gate", "up", "down")
    }
    assert mixed.kv_bytes_per_token() == spec.kv_bytes_per_token()


@pytest.mark.parametrize("executor", MAKE)
def test_experts_are_refused_by_name(executor: str) -> None:
    _, spec, tensors = llama()
    with pytest.raises(ModelError, match="feed-forward block of kind 'experts' is not supported"):
        MAKE[executor](with_experts_behind(spec), tensors)
    with pytest.raises(ModelError, match="kind 'experts' is not supported"):
        Decoder(with_experts_behind(spec), {})


@pytest.mark.parametrize("executor", MAKE)
def test_dense_layers_that_differ_are_computed(executor: str) -> None:
    """Dense layers of such models are wider than what one expert has; each layer has its own width."""
    _, spec, tensors = llama()
    wide = 2 * spec.layers[0].ffn.intermediate_size
    some: dict[str, Any] = dict(tensors)
    for part, axis in (("gate", 0), ("up", 0), ("down", 1)):
        name = f"layers.0.ffn.{part}_proj.weight"
        some[name] = np.concatenate([tensors[name], np.zeros_like(tensors[name])], axis)
    first, *others = spec.layers
    widened = replace(spec, layers=(replace(first, ffn=replace(first.ffn, intermediate_size=wide)), *others))
    got = sequence_logits(MAKE[executor](widened, some), IDS)
    assert relative_rms(got, sequence_logits(MAKE[executor](spec, tensors), IDS)) < 1e-6
