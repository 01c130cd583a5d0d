"""One harness for every method: perplexity and KL divergence to the original of any directory or GGUF file.

Whatever the format, its weights are read by `models` and computed in float32 by `models.reference`, on the
same windows of held-out text. Of the original only the last hidden vectors are kept; its logits are computed
again. Where a model's description asks for activations of 8 bits (W8A8), the inputs of its layers' matrices
are rounded as it says: one symmetric scale for each token.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from lmdeploy.models.files import read_json
from lmdeploy.models.reference import Decoder, masked_scores, visible
from lmdeploy.models.registry import open_checkpoint
from lmdeploy.models.spec import AttentionSpec
from lmdeploy.quant.tensors import GroupedTensor

_ROWS = 128  # positions whose logits are held at once


class Judge:
    """Compares models with one original on windows of token ids, all of one length."""

    def __init__(self, original: Path, windows: Sequence[npt.NDArray[np.int32]], skip: int) -> None:
        """skip: positions at the start of each window that are not scored."""
        self._windows, self._skip = windows, skip
        self._decoder = _decoder(original)
        self._hidden = [_hidden(self._decoder, ids)[skip:-1] for ids in windows]

    def judge(self, model: Path) -> dict[str, float]:
        """perplexity, kl (mean, nats), kl_error, kl_p99, same_top (share of positions)."""
        decoder = _decoder(model)
        loss, kl, same = [], [], 0
        for ids, kept in zip(self._windows, self._hidden, strict=True):
            ours = _hidden(decoder, ids)[self._skip : -1]
            wanted_ids = torch.from_numpy(np.asarray(ids[self._skip + 1 :], np.int64))
            for a in range(0, len(kept), _ROWS):
                part = slice(a, a + _ROWS)
                with torch.no_grad():
                    wanted = torch.log_softmax(self._decoder.logits(kept[part]), -1)
                    got = torch.log_softmax(decoder.logits(ours[part]), -1)
                kl += (wanted.exp() * (wanted - got)).double().sum(-1).tolist()
                loss += (-got.gather(1, wanted_ids[part, None])[:, 0]).tolist()
                same += int((wanted.argmax(-1) == got.argmax(-1)).sum())
        values = np.array(kl)
        return {
            "perplexity": float(np.exp(np.mean(loss))),
            "kl": float(values.mean()),
            "kl_error": float(values.std() / np.sqrt(len(values))),
            "kl_p99": float(np.quantile(values, 0.99)),
            "same_top": same / len(values),
            "positions": len(values),
        }


def facts_of(model: Path) -> dict[str, float]:
    """bits_per_weight: what the files take for the layers' matrices, scales and zero points included, by
    weight (the embedding is left in 16 bits by every side); size_mb: of all weight files."""
    checkpoint = open_checkpoint(model)
    linears = [linear for i in range(len(checkpoint.spec.layers)) for linear in checkpoint.spec.linears(i)]
    infos = [checkpoint.info(f"{linear.name}.weight") for linear in linears]
    values = sum(linear.out_features * linear.in_features for linear in linears)
    size = sum(file.stat().st_size for file in checkpoint.files if file.suffix in (".safetensors", ".gguf"))
    checkpoint.close()
    return {"bits_per_weight": 8 * sum(info.file_bytes for info in infos) / values, "size_mb": size / 1e6}


class ByteInputs(Decoder):
    """Rounds what the layers' matrices multiply to 255 steps, token by token."""

    def linear(self, name: str, x: torch.Tensor) -> torch.Tensor:
        if name.startswith("layers."):
            scale = x.abs().amax(-1, keepdim=True).clamp(min=1e-12) / 127
            x = (x / scale).round() * scale
        return super().linear(name, x)


def _decoder(model: Path) -> Decoder:
    checkpoint = open_checkpoint(model)
    weights = {}
    for name in checkpoint.names():
        tensor = checkpoint.read(name)
        values = tensor.dequantize() if isinstance(tensor, GroupedTensor) else tensor.astype(np.float32)
        weights[name] = torch.from_numpy(np.ascontiguousarray(values))
        checkpoint.release(name)
    checkpoint.close()
    kind = ByteInputs if rounds_inputs(model) else Decoder
    return kind(checkpoint.spec, weights)


def rounds_inputs(model: Path) -> bool:
    """Whether config.json asks for activations of 8 bits; ValueError for other ones."""
    file = model / "config.json"
    groups = read_json(file).get("quantization_config", {}).get("config_groups", {}) if file.exists() else {}
    asked = [g["input_activations"] for g in groups.values() if g.get("input_activations")]
    expected = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
    for activations in asked:
        other = {
            key: activations.get(key) for key, value in expected.items() if activations.get(key) != value
        }
        if other:
            raise ValueError(f"{model}: activations with {other} are not computed")
    return bool(asked)


def _hidden(decoder: Decoder, ids: npt.NDArray[np.int32]) -> torch.Tensor:
    """float32 [tokens, hidden] after the last norm."""
    positions = torch.arange(len(ids))

    def attend(_: int, a: AttentionSpec, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        group = a.num_heads // a.num_kv_heads
        keys, values = (x.transpose(0, 1).repeat_interleave(group, 0) for x in (k, v))
        scores = masked_scores(q.transpose(0, 1), keys, a, visible(positions, positions, a.window))
        return (torch.softmax(scores, -1) @ values).transpose(0, 1).reshape(len(q), -1)

    with torch.no_grad():
        return decoder.hidden(torch.from_numpy(np.asarray(ids, np.int64)), positions, attend)
