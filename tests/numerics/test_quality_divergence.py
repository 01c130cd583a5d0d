"""Perplexity, KL and agreement against transformers in float64 and NumPy."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lite_cases import config, quantise
from tiny_model import write_tiny_model
from transformers import LlamaConfig, LlamaForCausalLM

from lmdeploy.models.registry import open_checkpoint
from lmdeploy.quality.divergence import compare
from lmdeploy.quality.layers import layer_figures
from lmdeploy.quant.tensors import GroupedTensor


def write_models(folder: Path) -> list[Any]:
    """Two models of one shape: random weights, and the same disturbed."""
    torch.manual_seed(3)
    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=300,
        tie_word_embeddings=False,
        initializer_range=0.2,
    )
    first = LlamaForCausalLM(config)
    first.save_pretrained(folder / "first")
    with torch.no_grad():
        for weight in first.parameters():
            weight += 0.05 * torch.randn_like(weight)
    first.save_pretrained(folder / "second")
    return [
        LlamaForCausalLM.from_pretrained(folder / name, dtype=torch.float64) for name in ("first", "second")
    ]


def logs(model: Any, ids: list[int]) -> np.ndarray[Any, Any]:
    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits[0].numpy()
    shifted = logits - logits.max(-1, keepdims=True)
    return np.asarray(shifted - np.log(np.exp(shifted).sum(-1, keepdims=True)))


def test_figures_are_those_of_float64(tmp_path: Path) -> None:
    models = write_models(tmp_path)
    rng = np.random.default_rng(0)
    windows = [rng.integers(0, 300, n).tolist() for n in (40, 300, 7)]
    loss: list[list[float]] = [[], []]
    kl: list[float] = []
    agrees: list[bool] = []
    for ids in windows:
        p, q = (logs(model, ids)[:-1] for model in models)
        for found, log in zip(loss, (p, q), strict=True):
            found += [-log[i, ids[i + 1]] for i in range(len(ids) - 1)]
        kl += (np.exp(p) * (p - q)).sum(-1).tolist()
        agrees += (p.argmax(-1) == q.argmax(-1)).tolist()
    checkpoints = [open_checkpoint(tmp_path / name) for name in ("first", "second")]
    told: list[int] = []
    found = compare(checkpoints[0], checkpoints[1:], windows, lambda _, done, work: told.append(work - done))
    assert told[-1] == 0 and told == sorted(told, reverse=True)
    for one, expected in zip(found, loss, strict=True):
        assert np.allclose(one.loss, expected, rtol=1e-4, atol=1e-4)
    assert found[1].kl is not None and np.allclose(found[1].kl, kl, rtol=1e-3, atol=1e-5)
    assert np.isclose(found[1].perplexity, np.exp(np.mean(loss[1])), rtol=1e-4)
    assert np.isclose(found[1].top1, np.mean(agrees), atol=2 / len(agrees))
    assert found[0].mean_kl == 0.0 and found[0].top1 == 1.0


def test_a_model_is_no_distance_from_itself(tmp_path: Path) -> None:
    write_models(tmp_path)
    both = [open_checkpoint(tmp_path / "first") for _ in range(2)]
    found = compare(both[0], both[1:], [[1, 2, 3, 4, 5]])
    assert found[1].mean_kl == 0.0 and found[1].top1 == 1.0 and found[1].p99_kl == 0.0


def bytes_of_each_token(_: Any, fed: tuple[torch.Tensor]) -> torch.Tensor:
    scale = fed[0].abs().amax(-1, keepdim=True) / 127
    return torch.round(fed[0] / scale) * scale


def test_inputs_are_rounded_where_the_files_say_so(tmp_path: Path) -> None:
    """W8A8. The same weights in transformers, each matrix of the layers fed bytes by a hook."""
    write_tiny_model(tmp_path / "first")
    assert quantise("smooth_quant", tmp_path / "first", tmp_path / "w8", "--calib-samples", "0") == 0
    original, candidate = (open_checkpoint(tmp_path / name) for name in ("first", "w8"))
    first, second = (LlamaForCausalLM.from_pretrained(original.source, dtype=torch.float64) for _ in "12")
    for name in candidate.names():
        stored = candidate.read(name)
        if isinstance(stored, GroupedTensor):
            module = second.get_submodule(candidate.stored_name(name).removesuffix(".weight"))
            assert candidate.info(name).inputs == "bytes"
            module.weight.data = torch.from_numpy(stored.dequantize()).double()
            module.register_forward_pre_hook(bytes_of_each_token)
    windows = [np.random.default_rng(0).integers(0, 250, 40).tolist()]
    p, q = (logs(model, windows[0])[:-1] for model in (first, second))
    kl = (np.exp(p) * (p - q)).sum(-1)
    found = compare(original, [candidate], windows)[1]
    assert found.kl is not None and kl.mean() > 1e-4
    # a value between two steps may go to either: a few positions differ by more than float32 does
    assert np.isclose(found.kl.mean(), kl.mean(), rtol=0.05)
    assert np.median(np.abs(found.kl / kl - 1)) < 0.02
    described = config(tmp_path / "w8")
    del described["quantization_config"]["config_groups"]["group_0"]["input_activations"]
    (tmp_path / "w8" / "config.json").write_text(json.dumps(described))
    alone = open_checkpoint(tmp_path / "w8")
    layers = [layer_figures(original, one, windows)[0].own for one in (candidate, alone)]
    assert layers[0] > 1.2 * layers[1] > 0
