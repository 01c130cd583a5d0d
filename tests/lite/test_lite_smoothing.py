"""Folded scales leave every family's function as it is (K37), and are where the spec says they can be."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from family_models import bfloat16, config_of, tiny, write_hf

from lmdeploy.lite.smoothing import fold, smoothing_groups, storable
from lmdeploy.models.checkpoint import Checkpoint
from lmdeploy.models.reference import Reference
from lmdeploy.models.registry import open_checkpoint
from lmdeploy.quant.tensors import Tensor

FAMILIES = [
    ("Llama", {"attention_bias": True, "mlp_bias": True}),
    ("Llama", {"num_attention_heads": 8, "num_key_value_heads": 2}),
    ("Qwen2", {}),
    ("Qwen3", {}),
    ("Gemma2", {}),
    ("Gemma3", {}),
    ("Olmo2", {}),
    ("Phi3", {}),
    ("Granite", {}),
    ("Glm4", {}),
]


class Changed:
    """A checkpoint with some tensors replaced."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.checkpoint, self.spec = checkpoint, checkpoint.spec
        self.tensors: dict[str, Tensor] = {n: checkpoint.read(n) for n in checkpoint.names()}

    def names(self) -> frozenset[str]:
        return frozenset(self.tensors)

    def read(self, name: str) -> Tensor:
        return self.tensors[name]

    def layer(self, i: int) -> dict[str, torch.Tensor]:
        prefix = f"layers.{i}."
        names = [name for name in self.tensors if name.startswith(prefix)]
        return {
            n.removeprefix(prefix): torch.from_numpy(np.asarray(self.tensors[n], np.float32)) for n in names
        }


@pytest.mark.parametrize(("name", "options"), FAMILIES)
def test_folded_scales_leave_the_logits(name: str, options: dict[str, object], tmp_path: Path) -> None:
    model = tiny(name, **options)
    path = write_hf(tmp_path / name, json.loads(json.dumps(config_of(model))), bfloat16(model))
    changed = Changed(open_checkpoint(path))
    ids = np.random.default_rng(0).integers(3, 130, 40)
    before = Reference(changed).logits(ids)  # type: ignore[arg-type]
    generator, folded = torch.Generator().manual_seed(0), 0
    for i in range(len(changed.spec.layers)):
        for group in smoothing_groups(changed.spec, i):
            weights = changed.layer(i)
            channels = len(weights[f"{group.source}.weight"])
            wanted = torch.exp(torch.randn(channels, generator=generator))
            scales = storable(weights, group, wanted)
            assert (scales / wanted).log().abs().median() < 0.01
            for key, value in fold(weights, group, scales).items():
                changed.tensors[f"layers.{i}.{key}"] = value.numpy()
            folded += 1
    per_layer = 2 if name == "Olmo2" else 4  # no norm before its blocks
    assert folded == per_layer * len(changed.spec.layers)
    after = Reference(changed).logits(ids)  # type: ignore[arg-type]
    assert np.abs(after - before).max() <= 1e-4 * np.abs(before).max()


def test_new_norm_weights_are_exact_in_two_bytes(tmp_path: Path) -> None:
    model = tiny("Gemma2")
    path = write_hf(tmp_path / "model", config_of(model), bfloat16(model))
    weights = Changed(checkpoint := open_checkpoint(path)).layer(0)
    group = smoothing_groups(checkpoint.spec, 0)[0]
    assert group.offset == 1.0
    scales = storable(weights, group, torch.linspace(0.2, 5, 72))
    new = fold(weights, group, scales)["attn_norm.weight"]
    assert (new - new.bfloat16().float()).abs().max() <= 1e-6


def test_value_heads_share_scales_among_their_query_heads(tmp_path: Path) -> None:
    model = tiny("Llama", num_attention_heads=8, num_key_value_heads=2, head_dim=4)
    path = write_hf(tmp_path / "model", config_of(model), bfloat16(model))
    group = {g.source: g for g in smoothing_groups(open_checkpoint(path).spec, 0)}["attn.v_proj"]
    inputs = group.to_inputs(torch.arange(8.0))
    assert inputs.tolist() == [*[0.0, 1, 2, 3] * 4, *[4.0, 5, 6, 7] * 4]
    assert group.to_channels(inputs).tolist() == list(range(8))
