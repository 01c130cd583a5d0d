"""Which matrix gets which number format, from a recipe and headers alone; and what a file format cannot hold.

All refusals here come before any text or weight is read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from lmdeploy.errors import ConfigError
from lmdeploy.lite.mixed import check_mixed
from lmdeploy.lite.outside import outside_schemes
from lmdeploy.lite.recipe import Recipe
from lmdeploy.models.checkpoint import Checkpoint
from lmdeploy.models.formats.writers import WRITERS, Writer
from lmdeploy.quant.scheme import WHOLE_ROW, WeightScheme

Schemes = Mapping[str, WeightScheme | None]  # by canonical matrix name, None: kept


@dataclass(frozen=True, slots=True)
class Plan:
    """schemes: of the matrices of all layers, before mixed precision shares out bits. outside: of embedding
    and output matrix. notes: what is to be said."""

    schemes: dict[str, WeightScheme | None]
    outside: dict[str, WeightScheme | None]
    notes: list[str]


def plan_of(checkpoint: Checkpoint, recipe: Recipe, writer: Writer) -> Plan:
    """ConfigError when recipe, model and format do not go together."""
    check_format(recipe, writer)
    schemes, notes = even_schemes(checkpoint, recipe, writer)
    check_mixed(checkpoint, recipe, schemes, holds(checkpoint, writer))
    outside = outside_schemes(checkpoint.spec, writer) if recipe.head_bits == 8 else {}
    return Plan(schemes, outside, notes)


def holds(checkpoint: Checkpoint, writer: Writer) -> Callable[[str, WeightScheme], bool]:
    """Whether a format can hold a matrix so."""
    return lambda name, scheme: writer.refusal(scheme, _stored_shape(checkpoint, name)) is None


def check_format(recipe: Recipe, writer: Writer) -> None:
    """ConfigError when the format cannot hold what the recipe may lead to."""
    several = recipe.target_bpw is not None or (recipe.keep > 0 and recipe.keep_bits == 8)
    if several and not writer.mixed:
        names = " or ".join(name for name, one in WRITERS.items() if one.mixed)
        raise ConfigError(
            f"the format {writer.name} holds matrices of one kind; mixed precision needs the format {names}"
        )


def even_schemes(
    checkpoint: Checkpoint, recipe: Recipe, writer: Writer
) -> tuple[dict[str, WeightScheme | None], list[str]]:
    """The recipe's for every matrix of every layer; what the format cannot hold stays as it is. And what is
    to be said."""
    spec, schemes = checkpoint.spec, dict[str, WeightScheme | None]()
    for layer in range(len(spec.layers)):
        schemes.update({linear.name: recipe.scheme for linear in spec.linears(layer)})
    notes = _shorter_groups(checkpoint, schemes)
    refused: dict[str, list[str]] = {}
    for name, scheme in schemes.items():
        reason = None if scheme is None else writer.refusal(scheme, _stored_shape(checkpoint, name))
        if reason is not None:
            refused.setdefault(reason, []).append(name)
    for reason, names in refused.items():
        notes.append(f"{writer.name} {reason}: {_some(names)} stay as they are")
        schemes.update(dict.fromkeys(names))
    if not any(schemes.values()):
        raise ConfigError(
            f"no matrix can be written in the format {writer.name}, which {next(iter(refused))}"
        )
    if not spec.tie_embeddings:
        schemes["lm_head"] = None
    return schemes, notes


def _stored_shape(checkpoint: Checkpoint, name: str) -> tuple[int, int]:
    """Of the matrix that the files hold, which may be several of ours."""
    n, k = checkpoint.stored_shape(f"{name}.weight")
    return n, k


def _shorter_groups(checkpoint: Checkpoint, schemes: Schemes) -> list[str]:
    uneven: dict[int, int] = {}
    for name, scheme in schemes.items():
        inputs = checkpoint.info(f"{name}.weight").shape[1]
        if scheme is not None and scheme.group_size != WHOLE_ROW and inputs % scheme.group_size:
            uneven[inputs] = scheme.group_size
    return [
        f"{inputs} inputs are no multiple of {group}: the last group of each channel holds"
        f" {inputs % group if inputs > group else inputs}; readers that want whole groups refuse such files"
        for inputs, group in uneven.items()
    ]


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:2]) + (f" and {len(names) - 2} more" if len(names) > 2 else "")
