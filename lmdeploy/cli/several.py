"""The models of one server: the one on the command line, or the list in the file of --config.

An entry of the list takes what the command takes for a model and its engine, by the same names; what stands
beside the list holds for all of its entries. Knows no other flag.
"""

from __future__ import annotations

import argparse
from argparse import Namespace
from collections.abc import Callable
from typing import Any

from lmdeploy.cli.config_file import given, words_of
from lmdeploy.errors import ConfigError, shorten
from lmdeploy.models.hub import model_name

_ALIASES = {"name": "model-name"}


def models_of(args: Namespace, add_model_flags: Callable[[argparse.ArgumentParser], None]) -> list[Namespace]:
    """The arguments of each model, complete; with `share` and `by_path`. Raises ConfigError."""
    entries = args.config_own.get("models")
    if entries is None:
        if args.model_path is None:
            raise ConfigError("name a MODEL, or `model` or `models` in the file of --config")
        return [Namespace(**vars(args), share=1.0, by_path=True)]
    where = f"{args.config}: models"
    if not isinstance(entries, list) or not entries or not all(isinstance(e, dict) for e in entries):
        raise ConfigError(f"{where} must be a list of models, each with `model` and its settings")
    for name in ("model_path", "model_name"):
        if args.config_given.get(name):
            raise ConfigError(
                f"{where} names the models; a model or name beside the list would be one too many"
            )
    parser = type(args.config_parser)(prog=where, add_help=False)
    parser.add_argument("model_path", metavar="MODEL", nargs="?")
    add_model_flags(parser)
    models = [_model(args, parser, entry, f"{where}[{i}]: ") for i, entry in enumerate(entries)]
    _settle_names(models, where)
    return models


def _settle_names(models: list[Namespace], where: str) -> None:
    """A model that others share the last part of its path with goes by its own names alone."""
    given = [name for model in models for name in model.model_name]
    for name in given:
        if given.count(name) > 1:
            raise ConfigError(f"{where}: two models have the name {shorten(name)}")
    taken = [model_name(model.model_path) for model in models]
    for model, own in zip(models, taken, strict=True):
        model.by_path = taken.count(own) == 1 and own not in given
        if not model.by_path and not model.model_name:
            raise ConfigError(f"{where}: {shorten(own)} is not one model alone: give each a `name`")


def _model(args: Namespace, parser: argparse.ArgumentParser, entry: dict[str, Any], where: str) -> Namespace:
    settings = {_ALIASES.get(str(key), str(key)): value for key, value in entry.items()}
    share = settings.pop("share", 1.0)
    if isinstance(share, bool) or not isinstance(share, int | float) or not 0 < share < 1e9:
        raise ConfigError(f"{where}share must be a number above 0, got {shorten(share)}")
    if not isinstance(settings.get("model"), str):
        raise ConfigError(f"{where}`model` must name a directory, a GGUF file or a hub id")
    words = words_of(parser, settings, "model", where)
    own, _ = given(parser, parser.parse_known_args, words, where)
    values = {k: v for k, v in vars(own).items() if args.config_given.get(k) != "flag"}
    return Namespace(**{**vars(args), **values, "share": float(share)})
