"""Small models whose matrices one of our writers encoded, and the values meant, computed by NumPy alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import quantised_hf as q
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from lmdeploy.models.formats.writers import WRITERS
from lmdeploy.quant.scheme import WHOLE_ROW, WeightScheme
from lmdeploy.quant.tensors import GroupedTensor

IDS = np.random.default_rng(3).integers(0, q.VOCAB, 40).astype(np.int32)
Schemes = Mapping[str, WeightScheme | None]  # by the end of a module's name, "": every other one

FOUR, EIGHT = WeightScheme(4, 128), WeightScheme(8, 128)
CENTRED, CENTRED8 = WeightScheme(4, 128, True), WeightScheme(8, 128, True)
CHANNELS = WeightScheme(8, WHOLE_ROW, True)
FINER = WeightScheme(4, 64)
MIXED = {"": FOUR, "v_proj": EIGHT, "down_proj": CENTRED8, "1.mlp.up_proj": None, "k_proj": FINER}


@dataclass(frozen=True)
class Shape:
    """Sizes of a Llama with heads of 64."""

    hidden: int
    ffn: int
    heads: int
    kv_heads: int

    @property
    def config(self) -> dict[str, int]:
        return {
            "hidden_size": self.hidden,
            "intermediate_size": self.ffn,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": 64,
        }

    @property
    def linears(self) -> dict[str, tuple[int, int]]:
        kv = 64 * self.kv_heads
        rows = {f"self_attn.{x}_proj": self.hidden if x in "qo" else kv for x in "qkvo"}
        shapes = {name: (n, self.hidden) for name, n in rows.items()}
        shapes |= {f"mlp.{x}_proj": (self.ffn, self.hidden) for x in ("gate", "up")}
        return {**shapes, "mlp.down_proj": (self.hidden, self.ffn)}


DEMO = Shape(576, 1536, 9, 3)  # of the demo model: groups of 128 leave one of 64
WHOLE = Shape(512, 1024, 8, 4)  # whole groups, as most readers want them


def random_tensor(scheme: WeightScheme, n: int, k: int, seed: int) -> tuple[GroupedTensor, q.Array]:
    """A tensor and its values."""
    rng, middle = np.random.default_rng(seed), 1 << scheme.bits - 1
    group = k if scheme.group_size == WHOLE_ROW else scheme.group_size
    codes = rng.integers(1, 2 * middle, (n, k)).astype(np.uint8)
    grid = n, scheme.groups(k)
    zeros = np.full(grid, middle, np.uint8)
    if not scheme.symmetric:
        zeros = rng.integers(0, 2 * middle, grid).astype(np.uint8)
    scales = (rng.uniform(0.5, 1.0, grid) * 2 / middle * k**-0.5).astype(np.float16)
    group_of = np.arange(k) // group
    steps = codes.astype(np.float32) - zeros.astype(np.float32)[:, group_of]
    values = steps * scales.astype(np.float32)[:, group_of]
    if scheme.bits == 8 and scheme.symmetric:
        return GroupedTensor(8, group, (codes ^ 0x80).view(np.int8), scales), values
    return GroupedTensor(scheme.bits, group, codes, scales, zeros), values


def written(name: str, schemes: Schemes, shape: Shape, tied: bool = False) -> tuple[q.Model, dict[str, Any]]:
    """A model, and its quantization_config. The output matrix is kept unless schemes name it."""
    writer, found = WRITERS[name], dict[str, WeightScheme | None]()

    def quantise(module: str, n: int, k: int, seed: int) -> tuple[q.Parts, q.Array] | None:
        end = max((end for end in schemes if module.endswith(end)), key=len)
        scheme = found[module] = schemes[end]
        if scheme is None:
            return None
        assert writer.refusal(scheme, (n, k)) is None
        tensor, values = random_tensor(scheme, n, k, seed)
        return writer.encode(tensor, scheme.symmetric, np.dtype(np.float16)), values

    model = q.llama(quantise, hidden=shape.hidden, linears=shape.linears)
    for seed, module in enumerate(("model.embed_tokens", "lm_head")):
        if module.rpartition(".")[2] in schemes:
            parts, values = quantise(module, q.VOCAB, shape.hidden, 900 + seed) or ({}, None)
            del model.stored[f"{module}.weight"]
            model.stored |= {f"{module}.{part}": value for part, value in parts.items()}
            model.dense[f"{module}.weight"] = values
    if tied:
        del model.stored["lm_head.weight"]
        model.dense["lm_head.weight"] = model.dense["model.embed_tokens.weight"]
    return model, writer.config(found)


def expected_logits(model: q.Model, shape: Shape) -> q.Array:
    """Of transformers with the values meant, float32 [tokens, vocabulary]."""
    described = {k: v for k, v in {**q.CONFIG, **shape.config}.items() if k != "torch_dtype"}
    made = LlamaForCausalLM(LlamaConfig(**described)).eval()
    made.load_state_dict({name: torch.from_numpy(value.copy()) for name, value in model.dense.items()})
    return logits_of(made.float())


def logits_of(model: Any) -> q.Array:
    """Of a transformers model at IDS."""
    with torch.no_grad():
        return np.asarray(model(torch.from_numpy(IDS.astype(np.int64))[None]).logits[0].float().numpy())
