"""Quantised matrices that hold several projections: split through the family's rows, none dequantised.

Phi-3 stacks queries, keys and values, and gate and up; InternLM2 groups them by key head. Split, both are a
Llama: LlamaForCausalLM on the parts is the reference. The fused matrices are put together here.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import quantised_hf as q
import torch
from native_case import relative_rms, sequence_logits
from transformers import LlamaConfig, LlamaForCausalLM

from lmdeploy.models.reference import Reference
from lmdeploy.models.registry import open_checkpoint
from lmdeploy.turbomind.executor import NativeConfig, TurbomindExecutor
from lmdeploy.turbomind.plan import Limits

IDS = np.random.default_rng(3).integers(0, q.VOCAB, 60).astype(np.int32)
LIMITS = Limits(max_rows=4, max_step_tokens=64, max_context=128, block_size=16, num_threads=2)
GROUP = 64


def stacked(parts: list[q.Array]) -> q.Array:
    return np.concatenate(parts)


def by_key_head(parts: list[q.Array]) -> q.Array:
    """For each key head its queries, its key, its value."""
    d, group = q.HEAD_DIM, q.HEADS // q.KV_HEADS
    rows = []
    for head in range(q.KV_HEADS):
        rows.append(parts[0][head * group * d : (head + 1) * group * d])
        rows += [part[head * d : (head + 1) * d] for part in parts[1:]]
    return np.concatenate(rows)


QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
PHI3: dict[str, tuple[tuple[str, ...], Callable[[list[q.Array]], q.Array]]] = {
    "self_attn.qkv_proj": (QKV, stacked),
    "self_attn.o_proj": (("self_attn.o_proj",), stacked),
    "mlp.gate_up_proj": (("mlp.gate_proj", "mlp.up_proj"), stacked),
    "mlp.down_proj": (("mlp.down_proj",), stacked),
}
INTERNLM2 = {
    "attention.wqkv": (QKV, by_key_head),
    "attention.wo": (("self_attn.o_proj",), stacked),
    "feed_forward.w1": (("mlp.gate_proj",), stacked),
    "feed_forward.w3": (("mlp.up_proj",), stacked),
    "feed_forward.w2": (("mlp.down_proj",), stacked),
}
OTHERS = {
    "model.embed_tokens.weight": "model.tok_embeddings.weight",
    "lm_head.weight": "output.weight",
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "ffn_norm",
}


def fused(
    table: dict[str, Any], names: dict[str, str], pack: Callable[..., q.Parts], act_order: bool
) -> q.Model:
    """Stored under the family's names, dense under Llama's."""
    plain = q.llama(lambda *_: None)
    model = q.Model()
    for name, value in plain.stored.items():
        if ".bias" in name or ("proj" in name and "layers" in name):
            continue
        model.dense[name] = value.astype(np.float32)
        for old, new in names.items():
            name = name.replace(old, new)
        model.stored[name] = value
    for layer in range(q.LAYERS):
        for seed, (name, (members, join)) in enumerate(table.items()):
            k = q.LINEARS[members[0]][1]
            # Gate and up share their input, and so its order.
            shared = seed - 1 if members == ("mlp.up_proj",) else seed
            g_idx = q.act_order(k, GROUP, 10 * layer + shared) if act_order else None
            parts = []
            for number, member in enumerate(members):
                n = q.LINEARS[member][0]
                matrix = q.random_matrix(n, k, GROUP, seed=100 * layer + 10 * seed + number, least_zero=1)
                parts.append(matrix)
                model.dense[f"model.layers.{layer}.{member}.weight"] = q.weights(*matrix, g_idx)
            whole = [join([part[i] for part in parts]) for i in range(3)]
            stored = pack(g_idx)(*whole)
            model.stored |= {f"model.layers.{layer}.{name}.{part}": x for part, x in stored.items()}
    return model


def expected_logits(model: q.Model) -> q.Array:
    values = {k: v for k, v in q.CONFIG.items() if k != "torch_dtype"}
    config = LlamaConfig(**{**values, "attention_bias": False, "mlp_bias": False})
    made = LlamaForCausalLM(config).eval()
    made.load_state_dict({name: torch.from_numpy(value.copy()) for name, value in model.dense.items()})
    with torch.no_grad():
        return np.asarray(made.float()(torch.from_numpy(IDS.astype(np.int64))[None]).logits[0].numpy())


FAMILIES: dict[str, tuple[dict[str, Any], dict[str, str], dict[str, Any]]] = {
    "phi3": (
        PHI3,
        {},
        {
            "architectures": ["Phi3ForCausalLM"],
            "model_type": "phi3",
            "original_max_position_embeddings": 256,
        },
    ),
    "internlm2": (
        INTERNLM2,
        OTHERS,
        {"architectures": ["InternLM2ForCausalLM"], "model_type": "internlm2", "bias": False},
    ),
}
FORMATS: dict[str, tuple[Callable[[Any], Callable[..., q.Parts]], dict[str, Any], bool]] = {
    "awq": (lambda _: q.pack_awq, {"quant_method": "awq"}, False),
    "gptq act-order": (lambda g: q.pack_gptq(g_idx=g), {"quant_method": "gptq", "desc_act": True}, True),
}


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_equal_llama_on_the_parts(family: str, form: str, tmp_path: Path) -> None:
    table, names, described = FAMILIES[family]
    pack, quantization, act_order = FORMATS[form]
    model = fused(table, names, pack, act_order)
    described = {**described, "attention_bias": False, "mlp_bias": False}
    path = model.write(tmp_path, {**quantization, "bits": 4, "group_size": GROUP}, **described)
    wanted = expected_logits(model)
    checkpoint = open_checkpoint(path)
    kinds = {checkpoint.info(f"layers.1.attn.{part}_proj.weight").kind for part in "qkvo"}
    assert kinds == {"int4_zero"}
    assert relative_rms(Reference(checkpoint).logits(IDS), wanted) < 1e-5
    executor = TurbomindExecutor(NativeConfig(LIMITS, 16), checkpoint.spec, checkpoint)
    assert relative_rms(sequence_logits(executor, IDS), wanted) < 2e-3
    assert wanted.std() > 0.1
