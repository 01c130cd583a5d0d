"""From a model path to its spec and its weights: the only list of families.

Knows which architecture name belongs to which family; the families know the rest.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from lmdeploy.errors import ModelError
from lmdeploy.models.checkpoint import Checkpoint, GGUFStore, Store
from lmdeploy.models.families import (
    gemma,
    gemma2,
    gemma3,
    glm,
    glm4,
    granite,
    internlm2,
    internlm3,
    llama,
    mistral,
    olmo2,
    phi3,
    qwen2,
    qwen3,
    seed_oss,
    smollm3,
)
from lmdeploy.models.families.base import GGUF_FREQUENCIES, Family
from lmdeploy.models.families.names import text_part
from lmdeploy.models.fields import Fields, shown
from lmdeploy.models.files import ModelFiles, is_there, locate, read_json
from lmdeploy.models.formats import QUANTISED_FORMATS, scheme_of
from lmdeploy.models.formats.module import Scheme
from lmdeploy.models.gguf import GGUFFile
from lmdeploy.models.packed import is_packed, open_packed, read_packed
from lmdeploy.models.quantised_store import QuantisedStore
from lmdeploy.models.safetensors_dir import SafetensorsStore
from lmdeploy.models.spec import ModelSpec
from lmdeploy.models.tied import untied

FAMILIES: tuple[Family, ...] = (
    gemma.FAMILY,
    gemma2.FAMILY,
    gemma3.FAMILY,
    glm.FAMILY,
    glm4.FAMILY,
    granite.FAMILY,
    internlm2.FAMILY,
    internlm3.FAMILY,
    llama.FAMILY,
    mistral.FAMILY,
    olmo2.FAMILY,
    phi3.FAMILY,
    qwen2.FAMILY,
    qwen3.FAMILY,
    seed_oss.FAMILY,
    smollm3.FAMILY,
)
READABLE_FORMATS = ("hf", "gguf", *QUANTISED_FORMATS)

_BY_HF = {name: family for family in FAMILIES for name in family.hf_architectures}
_BY_WHOLE = {name: family for family in FAMILIES for name in family.hf_text_parts}
_BY_GGUF = {name: family for family in FAMILIES for name in family.gguf_architectures}


def load_spec(path: str | Path) -> ModelSpec:
    """The spec of the model at `path`; reads headers only. ModelError when it is damaged or unsupported."""
    if is_packed(path):
        return read_packed(Path(path)).spec
    files = locate(path)
    if files.format == "hf":
        return _hf_spec(files)[1]
    file = GGUFFile(files.path)
    spec = _gguf_spec(file)[1]
    file.close()
    return spec


def open_checkpoint(path: str | Path, model_format: str | None = None) -> Checkpoint:
    """The weights of the model at `path`, all of them accounted for; no weight is read yet.

    model_format must agree with the files ("hf": not quantised); None takes what is there.
    """
    if is_packed(path):
        return open_packed(path, model_format)
    files = locate(path)
    if files.format == "hf":
        return _open_hf(files, model_format)
    _check_format(files, model_format, "gguf")
    file = GGUFFile(files.path)
    family, spec = _gguf_spec(file)
    return Checkpoint(spec, GGUFStore(file), family.gguf_names or {}, _ignored_gguf(spec))


def _open_hf(files: ModelFiles, model_format: str | None) -> Checkpoint:
    family, spec, scheme, whole = _hf_spec(files)
    _check_format(files, model_format, scheme.name if scheme else "hf")
    plain = SafetensorsStore(files.path)
    store: Store = plain if scheme is None else QuantisedStore(plain, scheme)
    table, notes = family.hf_names, tuple[str, ...]()
    ignored: Callable[[str], bool] = _ignored_hf
    if whole is not None:
        notes = (f"only the language model of {whole} is read: texts, no images",)
        table, ignored = text_part(table, store.names(), ignored)
    spec, more = untied(spec, store, table)
    head = table["lm_head.weight"].name if spec.tie_embeddings else None
    return Checkpoint(spec, store, table, lambda name: ignored(name) or name == head, (*notes, *more))


def _ignored_gguf(spec: ModelSpec) -> Callable[[str], bool]:
    """Tensors that the family has read as part of the description."""
    kinds = {layer.attention.rope.kind for layer in spec.layers if layer.attention.rope is not None}
    of_kind = {
        "llama3": {GGUF_FREQUENCIES},
        "longrope": {"rope_factors_short.weight", "rope_factors_long.weight"},
    }
    return set[str]().union(*(of_kind.get(kind, ()) for kind in kinds)).__contains__


def _ignored_hf(name: str) -> bool:
    return name.endswith("rotary_emb.inv_freq")


def _check_format(files: ModelFiles, model_format: str | None, found: str) -> None:
    if model_format in (None, found):
        return
    if model_format not in READABLE_FORMATS:
        readable = ", ".join(READABLE_FORMATS)
        raise ModelError(
            f"{files.path}: model_format {model_format!r} cannot be read (readable: {readable}); the"
            f" files are {found!r}."
        )
    beside = sorted(files.path.glob("*.gguf")) if model_format == "gguf" else []
    remedy = f"give the path of {beside[0].name}" if beside else "leave it out"
    raise ModelError(
        f"{files.path}: model_format is {model_format!r}, but the files are {found!r}; {remedy}."
    )


def _hf_spec(files: ModelFiles) -> tuple[Family, ModelSpec, Scheme | None, str | None]:
    """Family, spec, number format, and the architecture of the whole where that is more than a text model."""
    config = read_json(files.path / "config.json")
    source = str(files.path / "config.json")
    fields = Fields(config, source)
    name = _architecture(fields)
    whole = name if name in _BY_WHOLE else None
    if whole is not None:
        fields = _text_config(fields, name)
    family = (_BY_HF | _BY_WHOLE)[name]
    _check_model_type(fields, family, name)
    spec = family.from_hf(fields)
    fields.refuse_unread()
    return family, spec, _scheme(files, config, source), whole


def _architecture(fields: Fields) -> str:
    """The first of `architectures`; ModelError when no family answers to it."""
    names, known = fields.get("architectures"), _BY_HF | _BY_WHOLE
    if names is not None and not isinstance(names, list):
        raise fields.fail("architectures", f"is {shown(names)}; a list of names is expected")
    name = names[0] if names else None
    if isinstance(name, str) and name in known:
        return name
    error = _unsupported(fields.source, name, known)
    if not isinstance(fields.get("text_config"), dict):
        raise error
    whole = ", ".join(sorted(_BY_WHOLE))
    raise ModelError(
        f"{error.message} The language model that text_config describes is read as a part of {whole} only."
    )


def _check_model_type(fields: Fields, family: Family, name: str) -> None:
    """transformers goes by model_type: it must not mean another family. Names of no family say nothing."""
    kind = fields.get("model_type")
    kind = kind.removesuffix("_text") if isinstance(kind, str) else kind
    if kind != family.name and any(kind == other.name for other in FAMILIES):
        raise fields.fail("model_type", f"is {shown(kind)}, but architectures says {name!r}; one is wrong")


def _scheme(files: ModelFiles, config: dict[str, Any], source: str) -> Scheme | None:
    """As config.json declares it; GPTQ directories from before that did so have a file of their own."""
    old = files.path / "quantize_config.json"
    if config.get("quantization_config") is None and is_there(old):
        return scheme_of({"quantization_config": {"quant_method": "gptq", **read_json(old)}}, str(old))
    return scheme_of(config, source)


def _text_config(fields: Fields, name: str) -> Fields:
    """The description of the language model inside one of a whole of architecture `name`."""
    values, kind = fields.table("text_config"), _BY_WHOLE[name].hf_text_parts[name]
    if values is None:
        raise fields.fail("text_config", f"is missing, which a {name} must have")
    if not fields.absent("tie_word_embeddings"):  # that of the whole is followed
        values = {**values, "tie_word_embeddings": fields.get("tie_word_embeddings")}
    part = Fields(values, f"{fields.source}: text_config")
    if part.get("model_type") != kind:
        raise part.fail(
            "model_type",
            f"is {shown(part.get('model_type'))}, which is not supported in a {name} (supported: {kind})",
        )
    return part


def _gguf_spec(file: GGUFFile) -> tuple[Family, ModelSpec]:
    name = file.metadata.get("general.architecture")
    if not isinstance(name, str) or name not in _BY_GGUF:
        raise _unsupported(str(file.path), name, _BY_GGUF)
    if file.metadata.get("split.count") not in (None, 1):
        raise ModelError(f"{file.path}: one part of a split GGUF model; join the parts into one file first.")
    family, fields = _BY_GGUF[name], Fields(file.metadata, str(file.path), f"{name}.")
    assert family.from_gguf is not None
    spec = family.from_gguf(fields, file)
    fields.refuse_unread()
    return family, spec


def _unsupported(source: str, name: object, known: dict[str, Family]) -> ModelError:
    supported = ", ".join(sorted(known))
    if name is None:
        return ModelError(f"{source}: names no model architecture (supported: {supported}).")
    return ModelError(
        f"{source}: model architecture {shown(name)} is not supported (supported: {supported})."
    )
