"""From a model path to its spec and its weights: the only list of families.

Knows which architecture name belongs to which family; the families know the rest.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

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
from lmdeploy.models.families.base import Family
from lmdeploy.models.fields import Fields, shown
from lmdeploy.models.files import ModelFiles, locate, read_json
from lmdeploy.models.formats import QUANTISED_FORMATS, scheme_of
from lmdeploy.models.formats.module import Scheme
from lmdeploy.models.gguf import GGUFFile
from lmdeploy.models.packed import is_packed, open_packed, read_packed
from lmdeploy.models.quantised_store import QuantisedStore
from lmdeploy.models.safetensors_dir import SafetensorsStore
from lmdeploy.models.spec import ModelSpec

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

# Read by the families as part of the description.
_GGUF_ROPE_TENSORS = ("rope_freqs.weight", "rope_factors_short.weight", "rope_factors_long.weight")

_BY_HF = {name: family for family in FAMILIES for name in family.hf_architectures}
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
        family, spec, scheme = _hf_spec(files)
        _check_format(files, model_format, scheme.name if scheme else "hf")
        plain = SafetensorsStore(files.path)
        store: Store = plain if scheme is None else QuantisedStore(plain, scheme)
        return Checkpoint(spec, store, family.hf_names, _ignored_hf(spec))
    _check_format(files, model_format, "gguf")
    file = GGUFFile(files.path)
    family, spec = _gguf_spec(file)
    return Checkpoint(spec, GGUFStore(file), family.gguf_names or {}, _GGUF_ROPE_TENSORS.__contains__)


def _ignored_hf(spec: ModelSpec) -> Callable[[str], bool]:
    return lambda name: (
        name.endswith("rotary_emb.inv_freq") or (spec.tie_embeddings and name == "lm_head.weight")
    )


def _check_format(files: ModelFiles, model_format: str | None, found: str) -> None:
    if model_format in (None, found):
        return
    if model_format not in READABLE_FORMATS:
        readable = ", ".join(READABLE_FORMATS)
        raise ModelError(
            f"{files.path}: model_format {model_format!r} cannot be read (readable: {readable}); the"
            f" files are {found!r}."
        )
    raise ModelError(
        f"{files.path}: model_format is {model_format!r}, but the files are {found!r}; leave it out."
    )


def _hf_spec(files: ModelFiles) -> tuple[Family, ModelSpec, Scheme | None]:
    config = read_json(files.path / "config.json")
    source = str(files.path / "config.json")
    architectures = config.get("architectures")
    name = architectures[0] if isinstance(architectures, list) and architectures else None
    if not isinstance(name, str) or name not in _BY_HF:
        raise _unsupported(source, name, _BY_HF)
    fields = Fields(config, source)
    spec = _BY_HF[name].from_hf(fields)
    fields.refuse_unread()
    return _BY_HF[name], spec, scheme_of(config, source)


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
