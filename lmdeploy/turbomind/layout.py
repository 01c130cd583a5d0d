"""How the native engine holds a model: which tensors become which packed matrices, how inputs are prepared.

Derived from a spec and tensor headers alone; read by the memory plan and by the loader, so that they cannot
disagree. Knows no files, no values and no extension module.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Protocol

from lmdeploy.errors import ModelError
from lmdeploy.models.rope import SUPPORTED as ROPE_KINDS
from lmdeploy.models.spec import AttentionSpec, LayerSpec, LinearSpec, ModelSpec
from lmdeploy.turbomind.accuracy import ALWAYS, NEVER, THRESHOLDS, Accuracy

TILE = 16  # output channels of a packed tile
ROW_BLOCK = 8  # rows of a block of prepared inputs
MAX_HEAD_DIM = 512  # kMaxHeadDim of the kernels
GROUPS = (128, 64, 32, 16)  # inputs per scale that the kernels take; 16 only when they come in pairs
ACTIVATIONS = ("silu", "gelu_tanh", "gelu")  # in the order of the native enumeration
W4_ZERO, W4_MIN, INT8, BF16, INT8_MIN, FP16 = range(6)  # WeightKind of csrc/kernels/table.h
KINDS = {
    "int4_zero": W4_ZERO,
    "int4_min": W4_MIN,
    "int8": INT8,
    "int8_min": INT8_MIN,
    "float32": BF16,
    "float16": FP16,
    "bfloat16": BF16,
}
_LINE_INPUTS = {
    W4_ZERO: 8,
    W4_MIN: 8,
    INT8: 4,
    BF16: 2,
    INT8_MIN: 4,
    FP16: 2,
}  # inputs of 16 channels in 64 bytes


DENSE = (BF16, FP16)  # 16-bit floats: no groups, no scales
FLOATS = ("float32", "float16", "bfloat16")


class Header(Protocol):
    """What is known of a tensor before it is read (models.checkpoint.TensorInfo)."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def kind(self) -> str: ...
    @property
    def group_size(self) -> int: ...
    @property
    def ordered(self) -> bool: ...


Headers = Mapping[str, Header]


@dataclass(frozen=True, slots=True)
class MatrixLayout:
    """One packed matrix [n, k] of whole tensors. `run` > 0: gate and up alternate in runs of that many."""

    kind: int
    n: int
    k: int
    group: int  # 0 for 16-bit floats
    tensors: tuple[str, ...]
    run: int = 0

    @property
    def nbytes(self) -> int:
        """Bytes of the packed form: lines, then scales, then zeros or minima, each a multiple of 64."""
        tiles, unit = ceil_div(self.n, TILE), self.group or 2
        padded = ceil_div(self.k, unit) * unit
        lines = tiles * padded // _LINE_INPUTS[self.kind] * 64
        if self.kind in DENSE:
            return lines
        entries = tiles * TILE * padded // self.group
        offsets = {W4_ZERO: entries, W4_MIN: 2 * entries, INT8_MIN: 2 * entries}.get(self.kind, 0)
        return lines + align(2 * entries) + align(offsets)


@dataclass(frozen=True, slots=True)
class InputLayout:
    """How k inputs are prepared: int8 planes in groups (0: none), bfloat16 planes, float32, or several.

    bf16: how many planes, 2 where every digit counts.
    threshold: which groups have a second int8 plane (accuracy.py).
    """

    k: int
    group: int
    bf16: int
    f32: bool
    threshold: float = ALWAYS

    def nbytes(self, rows: int) -> int:
        """Bytes of `rows` prepared rows, laid out as csrc/workspace.cpp does."""
        total = 0
        if self.group:
            padded = ceil_div(self.k, self.group) * self.group
            groups = ceil_div(rows, ROW_BLOCK) * ROW_BLOCK * padded // self.group
            total += align(rows * padded) + 3 * align(groups * 4)
            if self.threshold != NEVER:
                total += align(rows * padded) + align(groups)
        values = rows * ceil_div(self.k, 2) * 2
        return total + self.bf16 * align(2 * values) + self.f32 * align(4 * values)


@dataclass(frozen=True, slots=True)
class LinearLayout:
    """Matrices that share an input; their outputs follow each other.

    ordered: they take the input in an order that their tensors give (act-order).
    """

    input: InputLayout
    matrices: tuple[MatrixLayout, ...]
    biases: tuple[str, ...] = ()
    ordered: bool = False


@dataclass(frozen=True, slots=True)
class LayerLayout:
    """One layer; `vectors` maps the native role of a norm to its tensor."""

    qkv: LinearLayout
    o: LinearLayout
    gate_up: LinearLayout
    down: LinearLayout
    vectors: Mapping[str, str]

    @property
    def linears(self) -> tuple[LinearLayout, ...]:
        return self.qkv, self.o, self.gate_up, self.down

    @property
    def order_bytes(self) -> int:
        """Bytes of the orders that are kept. That of `down` is not: gate and up follow it instead."""
        kept = (self.qkv, self.o, self.gate_up)
        return sum(align(4 * linear.input.k) for linear in kept if linear.ordered)


@dataclass(frozen=True, slots=True)
class ModelLayout:
    """`head` is None when it shares the packed embedding."""

    layers: tuple[LayerLayout, ...]
    embedding: MatrixLayout
    head: MatrixLayout | None
    head_input: InputLayout
    vector_lengths: Mapping[str, int]  # every bias and norm
    head_ordered: bool = False

    def matrices(self) -> Iterator[MatrixLayout]:
        """All packed matrices, in the order they are loaded."""
        yield self.embedding
        for layer in self.layers:
            for linear in layer.linears:
                yield from linear.matrices
        if self.head is not None:
            yield self.head

    def ordered_together(self) -> Iterator[tuple[str, ...]]:
        """Tensors that share an input, for each input whose order they give; they must give the same."""
        for layer in self.layers:
            for linear in layer.linears:
                if linear.ordered:
                    yield tuple(name for matrix in linear.matrices for name in matrix.tensors)

    @property
    def nbytes(self) -> int:
        """Bytes of all packed weights."""
        vectors = sum(align(4 * length) for length in self.vector_lengths.values())
        orders = sum(layer.order_bytes for layer in self.layers)
        orders += align(4 * self.head_input.k) if self.head_ordered else 0
        return vectors + orders + sum(matrix.nbytes for matrix in self.matrices())


def ceil_div(value: int, by: int) -> int:
    """value / by, rounded up."""
    return -(-value // by)


def align(nbytes: int) -> int:
    """Rounded up to 64 bytes."""
    return ceil_div(nbytes, 64) * 64


@dataclass(frozen=True, slots=True)
class _Held:
    """A tensor of another float type than in the file."""

    shape: tuple[int, ...]
    kind: str
    group_size: int = 0
    ordered: bool = False


def _held(headers: Headers, dtype: str) -> Headers:
    """The headers with every float tensor of type `dtype`; "auto": as the file has them."""
    if dtype == "auto":
        return headers
    return {n: _Held(h.shape, dtype) if h.kind in FLOATS else h for n, h in headers.items()}


def model_layout(
    spec: ModelSpec, headers: Headers, accuracy: Accuracy = "exact", dtype: str = "auto"
) -> ModelLayout:
    """The packed form of a model. ModelError when no kernel computes it or a shape is unlike the spec.

    dtype: "bfloat16" or "float16" for all unquantised matrices; "auto": float16 stays, all else bfloat16.
    """
    headers = _held(headers, dtype)
    for layer in spec.layers:
        _check_supported(layer)
    for name, shape in spec.tensors():
        if headers[name].shape != shape:
            raise ModelError(
                f"tensor {name!r} has shape {list(headers[name].shape)}; the model's description asks for"
                f" {list(shape)}"
            )
    layers = [_layer(spec, index, headers) for index in range(len(spec.layers))]
    head_name = "embed.weight" if spec.tie_embeddings else "lm_head.weight"
    embedding = _single("embed.weight", headers)
    head = None if spec.tie_embeddings else _single(head_name, headers)
    lengths = {n: s[0] for n, s in spec.tensors() if len(s) == 1}
    if headers["embed.weight"].ordered:
        raise ModelError("tensor 'embed.weight' lists its columns in another order (act-order)")
    ordered = _ordered([head_name], headers)
    layout = ModelLayout(tuple(layers), embedding, head, _input([head_name], headers), lengths, ordered)
    return _with_threshold(layout, THRESHOLDS[accuracy])


def _with_threshold(layout: ModelLayout, threshold: float) -> ModelLayout:
    """The layout with every input prepared by that rule."""

    def planes(x: InputLayout) -> InputLayout:
        return replace(x, threshold=threshold, bf16=x.bf16 and (2 if threshold == ALWAYS else 1))

    def linear(x: LinearLayout) -> LinearLayout:
        return replace(x, input=planes(x.input))

    layers = tuple(
        LayerLayout(linear(x.qkv), linear(x.o), linear(x.gate_up), linear(x.down), x.vectors)
        for x in layout.layers
    )
    return replace(layout, layers=layers, head_input=planes(layout.head_input))


def _layer(spec: ModelSpec, index: int, headers: Headers) -> LayerLayout:
    q, k, v, o, gate, up, down = spec.linears(index)
    weights = [f"{linear.name}.weight" for linear in (q, k, v, o, gate, up, down)]
    qkv, o_proj, down_proj = weights[:3], weights[3:4], weights[6:]
    down_input = _input(down_proj, headers)

    def biases(*linears: LinearSpec) -> tuple[str, ...]:
        return tuple(f"{x.name}.bias" for x in linears if x.bias)

    return LayerLayout(
        LinearLayout(
            _input(qkv, headers), tuple(_joined(qkv, headers)), biases(q, k, v), _ordered(qkv, headers)
        ),
        LinearLayout(
            _input(o_proj, headers), (_single(o_proj[0], headers),), biases(o), _ordered(o_proj, headers)
        ),
        _gate_up(weights[4], weights[5], down_input, headers, biases(gate, up)),
        LinearLayout(down_input, (_single(weights[6], headers),), biases(down), _ordered(down_proj, headers)),
        _vectors(spec.layers[index], f"layers.{index}"),
    )


def _vectors(layer: LayerSpec, prefix: str) -> dict[str, str]:
    roles = {f"{b}_norm": f"{prefix}.{b}_norm.weight" for b in ("attn", "ffn") if layer.pre_norm}
    roles |= {f"{b}_post_norm": f"{prefix}.{b}_post_norm.weight" for b in ("attn", "ffn") if layer.post_norm}
    if layer.attention.qk_norm:
        roles |= {f"{x}_norm": f"{prefix}.attn.{x}_norm.weight" for x in "qk"}
    return roles


def _gate_up(
    gate: str, up: str, down_input: InputLayout, headers: Headers, biases: tuple[str, ...]
) -> LinearLayout:
    """One matrix of alternating runs, each as wide as a group of what follows; two when the kinds differ."""
    shared = _input([gate, up], headers)
    parts = tuple(_matrix([name], headers, shared.group) for name in (gate, up))
    if parts[0].kind == parts[1].kind:
        n = 2 * ceil_div(parts[0].n, TILE) * TILE
        run = down_input.group or 2 * TILE
        parts = (MatrixLayout(parts[0].kind, n, parts[0].k, parts[0].group, (gate, up), run),)
    return LinearLayout(shared, parts, biases, _ordered([gate, up], headers))


def _joined(names: list[str], headers: Headers) -> Iterator[MatrixLayout]:
    """Neighbours of one kind become one matrix."""
    group, start = _input(names, headers).group, 0
    kinds = [_kind(headers[name], name) for name in names]
    for i in range(1, len(names) + 1):
        if i == len(names) or kinds[i] != kinds[start]:
            yield _matrix(names[start:i], headers, group)
            start = i


def _single(name: str, headers: Headers) -> MatrixLayout:
    return _matrix([name], headers, _input([name], headers).group)


def _matrix(names: list[str], headers: Headers, group: int) -> MatrixLayout:
    kind = _kind(headers[names[0]], names[0])
    n = sum(headers[name].shape[0] for name in names)
    return MatrixLayout(kind, n, headers[names[0]].shape[1], 0 if kind in DENSE else group, tuple(names))


def _input(names: Iterable[str], headers: Headers) -> InputLayout:
    """Prepared for all of `names`: at the largest group that divides every group among them."""
    parts = [(name, headers[name]) for name in names]
    grouped = [(name, header) for name, header in parts if _kind(header, name) not in DENSE]
    k = parts[0][1].shape[1]
    group = 0
    if grouped:
        groups = [g for g in GROUPS if g >= 32 or k % 32 == 0]
        fits = [g for g in groups if all(h.group_size >= k or h.group_size % g == 0 for _, h in grouped)]
        if not fits:
            name, header = min(grouped, key=lambda part: part[1].group_size % groups[-1] == 0)
            raise ModelError(
                f"tensor {name!r} has groups of {header.group_size} values, which the native engine cannot"
                f" compute (supported: multiples of {groups[-1]}, or one group per output channel)"
            )
        group = fits[0]
    kinds = {_kind(header, name) for name, header in parts}
    return InputLayout(k, group, 2 if BF16 in kinds else 0, FP16 in kinds)


def _ordered(names: list[str], headers: Headers) -> bool:
    """Whether tensors that share an input list it in an order of their own; all of them must, or none."""
    ordered = [headers[name].ordered for name in names]
    if any(ordered) and not all(ordered):
        raise ModelError(
            f"tensor {names[ordered.index(True)]!r} lists its inputs in an order of its own (act-order), and"
            f" {names[ordered.index(False)]!r} does not; the native engine cannot compute them together"
        )
    return any(ordered)


def _kind(header: Header, name: str) -> int:
    if header.kind not in KINDS:
        raise ModelError(
            f"tensor {name!r} is of kind {header.kind!r}, which the native engine cannot compute"
            f" (supported: {', '.join(KINDS)})"
        )
    return KINDS[header.kind]


def _check_supported(layer: LayerSpec) -> None:
    attention, ffn = layer.attention, layer.ffn
    if ffn.kind != "gated":
        raise ModelError(
            f"a feed-forward block of kind {ffn.kind!r} is not supported by the native engine"
            " (supported: gated)"
        )
    if attention.head_dim % TILE or attention.head_dim > MAX_HEAD_DIM:
        raise ModelError(
            f"head_dim {attention.head_dim} is not supported by the native engine"
            f" (supported: multiples of {TILE} up to {MAX_HEAD_DIM})"
        )
    if attention.num_heads % attention.num_kv_heads:
        raise ModelError(
            f"{attention.num_heads} query heads over {attention.num_kv_heads} key/value heads are not"
            " supported by the native engine (supported: a whole number of query heads for each)"
        )
    _check_rope(attention)
    if ffn.activation not in ACTIVATIONS:
        raise ModelError(
            f"activation {ffn.activation!r} is not supported by the native engine"
            f" (supported: {', '.join(ACTIVATIONS)})"
        )


def _check_rope(attention: AttentionSpec) -> None:
    rope = attention.rope
    if rope is None:
        return
    if rope.kind not in ROPE_KINDS:
        raise ModelError(
            f"rope kind {rope.kind!r} is not supported by the native engine"
            f" (supported: {', '.join(ROPE_KINDS)})"
        )
    if rope.rotary_dim > attention.head_dim or rope.rotary_dim % 2:
        raise ModelError(
            f"rotary_dim {rope.rotary_dim} is not supported with head_dim {attention.head_dim}"
            " (supported: even numbers up to head_dim)"
        )
