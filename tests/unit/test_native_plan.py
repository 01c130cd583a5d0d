"""Sizes and layout of the native engine, from headers alone; figures worked out by hand."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from lmdeploy.engine.executor import Limits
from lmdeploy.errors import ModelError
from lmdeploy.models.spec import AttentionSpec, FfnSpec, LayerSpec, ModelSpec, NormSpec, RopeSpec
from lmdeploy.turbomind.cpus import choose_cpus
from lmdeploy.turbomind.layout import (
    BF16,
    INT8,
    INT8_MIN,
    W4_MIN,
    W4_ZERO,
    InputLayout,
    MatrixLayout,
    model_layout,
)
from lmdeploy.turbomind.plan import kv_token_bytes, native_plan

ATTENTION = AttentionSpec(4, 2, 32, 0.2, RopeSpec(10000.0, 32))
SPEC = ModelSpec(
    "test", 128, 1000, 4096, NormSpec(1e-5), (LayerSpec(ATTENTION, FfnSpec(320)),) * 2, tie_embeddings=True
)
LIMITS = Limits(max_rows=8, max_step_tokens=64, max_context=1024, block_size=16, num_threads=2)


@dataclass(frozen=True)
class Info:
    shape: tuple[int, ...]
    kind: str
    group_size: int = 0
    ordered: bool = False


def headers(spec: ModelSpec, **kinds: tuple[str, int]) -> dict[str, Info]:
    """bfloat16 but for the tensors whose last name but one is given."""
    return {
        name: Info(shape, *kinds.get(name.split(".")[-2], ("bfloat16", 0))) for name, shape in spec.tensors()
    }


@pytest.mark.parametrize(
    ("layout", "nbytes"),
    [
        (MatrixLayout(BF16, 48, 128, 0, ()), 48 * 128 * 2),
        (MatrixLayout(BF16, 50, 127, 0, ()), 64 * 128 * 2),
        (MatrixLayout(INT8, 48, 128, 64, ()), 48 * 128 + 48 * 2 * 2),
        (MatrixLayout(INT8, 48, 128, 16, ()), 48 * 128 + 48 * 8 * 2),
        (MatrixLayout(INT8_MIN, 48, 128, 32, ()), 48 * 128 + 2 * (48 * 4 * 2)),
        (MatrixLayout(W4_MIN, 48, 128, 32, ()), 48 * 64 + 2 * (48 * 4 * 2)),
        (MatrixLayout(W4_ZERO, 48, 128, 32, ()), 48 * 64 + 48 * 4 * 2 + 48 * 4),
        (MatrixLayout(W4_ZERO, 10, 576, 128, ()), 16 * 320 + 192 + 128),  # five groups; 160 and 80 padded
    ],
)
def test_packed_bytes(layout: MatrixLayout, nbytes: int) -> None:
    assert layout.nbytes == nbytes


def test_input_bytes() -> None:
    assert InputLayout(128, 32, 0, False).nbytes(4) == 2 * 512 + 3 * 128 + 64
    assert InputLayout(128, 32, 0, False, float("inf")).nbytes(4) == 512 + 3 * 128
    assert InputLayout(96, 0, 2, False).nbytes(1) == 2 * 192
    assert InputLayout(96, 32, 2, False).nbytes(1) == 2 * 128 + 3 * 128 + 64 + 2 * 192


def test_weights_and_cache_of_a_dense_model() -> None:
    plan = native_plan(SPEC, headers(SPEC), LIMITS)
    matrices = 1000 * 128 + 2 * (128 * 128 * 2 + 64 * 128 * 2 + 3 * 320 * 128)
    padding = 8 * 128  # the vocabulary to whole tiles
    assert plan.weights == 2 * (matrices + padding) + 5 * 128 * 4
    assert plan.block == 2 * 2 * 2 * (32 * 2 + 2) * 16  # layers, key and value, heads, dim and scale, tokens


@pytest.mark.parametrize(
    ("bits", "head_dim", "head"),
    [(16, 64, 2 * 64 * 2 + 4), (8, 64, 2 * 64 + 8), (4, 64, 2 * 32 + 8), (8, 80, 168), (4, 80, 40 + 48 + 8)],
)
def test_cache_of_fewer_bits(bits: int, head_dim: int, head: int) -> None:
    layers = (LayerSpec(replace(ATTENTION, head_dim=head_dim), FfnSpec(320)),) * 2
    assert kv_token_bytes(replace(SPEC, layers=layers), bits) == 2 * 2 * head  # layers, heads


def test_workspace_grows_with_each_limit() -> None:
    base = native_plan(SPEC, headers(SPEC), LIMITS).workspace
    for change in ({"max_step_tokens": 65}, {"max_context": 1025}, {"num_threads": 3}):
        assert native_plan(SPEC, headers(SPEC), replace(LIMITS, **change)).workspace > base
    assert native_plan(SPEC, headers(SPEC), replace(LIMITS, max_rows=4)).workspace == base


def test_parts_of_one_kind_are_one_matrix() -> None:
    layer = model_layout(SPEC, headers(SPEC, v_proj=("int8", 32))).layers[0]
    assert [(m.kind, m.n, len(m.tensors)) for m in layer.qkv.matrices] == [(BF16, 192, 2), (INT8, 64, 1)]
    assert layer.qkv.input == InputLayout(128, 32, 2, False)
    assert layer.gate_up.matrices[0].run == 32


def test_coarser_groups_are_packed_at_the_finest_beside_them() -> None:
    kinds = {"q_proj": ("int4_min", 32), "k_proj": ("int8", 128), "v_proj": ("int8", 64)}
    layer = model_layout(SPEC, headers(SPEC, **kinds)).layers[0]
    assert [m.group for m in layer.qkv.matrices] == [32, 32]
    alone = model_layout(SPEC, headers(SPEC, down_proj=("int4_zero", 320))).layers[0]
    assert alone.down.matrices[0].group == 128
    assert alone.gate_up.matrices[0].run == 128


def test_untied_head_is_counted() -> None:
    untied = replace(SPEC, tie_embeddings=False)
    more = native_plan(untied, headers(untied, lm_head=("int8", 128)), LIMITS).weights
    assert more - native_plan(SPEC, headers(SPEC), LIMITS).weights == 1008 * 128 + 2048


@pytest.mark.parametrize(
    ("attention", "words"),
    [
        (replace(ATTENTION, head_dim=40), ["head_dim 40", "multiples of 16"]),
        (replace(ATTENTION, head_dim=528), ["head_dim 528", "up to 512"]),
        (replace(ATTENTION, num_heads=5), ["5 query heads", "2 key/value heads"]),
        (replace(ATTENTION, rope=RopeSpec(1e4, 32, "foo")), ["'foo'", "default, linear, dynamic"]),
    ],
)
def test_unsupported_mathematics_is_refused_by_name(attention: AttentionSpec, words: list[str]) -> None:
    spec = replace(SPEC, layers=(LayerSpec(attention, FfnSpec(320)),))
    with pytest.raises(ModelError) as error:
        model_layout(spec, headers(spec))
    assert all(word in error.value.message for word in words)


def test_other_feed_forward_blocks_are_refused_by_name() -> None:
    layers = (LayerSpec(ATTENTION, FfnSpec(320)), LayerSpec(ATTENTION, FfnSpec(320, kind="experts")))
    spec = replace(SPEC, layers=layers)
    with pytest.raises(ModelError, match=r"of kind 'experts' is not supported.*\(supported: gated\)"):
        native_plan(spec, headers(spec), LIMITS)


@pytest.mark.parametrize(("kind", "words"), [(("int3", 32), "'int3'"), (("int8", 24), "groups of 24")])
def test_unsupported_weights_are_refused_by_name(kind: tuple[str, int], words: str) -> None:
    with pytest.raises(ModelError, match=words) as error:
        model_layout(SPEC, headers(SPEC, o_proj=kind))
    assert "layers.0.attn.o_proj.weight" in error.value.message


def test_a_shape_unlike_the_spec_is_refused_naming_both() -> None:
    infos = headers(SPEC) | {"layers.1.ffn.up_proj.weight": Info((320, 64), "bfloat16")}
    with pytest.raises(ModelError, match=r"layers\.1\.ffn\.up_proj\.weight.*\[320, 64\].*\[320, 128\]"):
        native_plan(SPEC, infos, LIMITS)


def test_threads_go_to_different_cores_first(tmp_path: Path) -> None:
    for cpu in range(8):
        folder = tmp_path / f"sys/devices/system/cpu/cpu{cpu}/topology"
        folder.mkdir(parents=True)
        (folder / "thread_siblings_list").write_text(f"{cpu % 4},{cpu % 4 + 4}\n")
    assert choose_cpus(3, range(8), tmp_path) == [0, 1, 2]
    assert choose_cpus(3, [1, 5, 2, 6, 7], tmp_path) == [1, 2, 7]
    assert choose_cpus(4, [1, 5, 2, 6], tmp_path) == [1, 2, 5, 6]
    assert choose_cpus(3, [0, 1], tmp_path) == [-1, -1, -1]
