"""`compare`: everything that is measured of an original and of models made from it, as one `Report`.

Owns the order of the measurements, what is compared with what, and what is said when it cannot be.
"""

from __future__ import annotations

import json
import platform
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import torch

from lmdeploy import __version__
from lmdeploy.errors import ConfigError, LMDeployError, ModelError
from lmdeploy.lite.workspace import RECORD
from lmdeploy.models.checkpoint import Checkpoint
from lmdeploy.models.files import is_there, read_json
from lmdeploy.models.hub import resolve_model_path
from lmdeploy.models.packed import is_packed
from lmdeploy.models.registry import open_checkpoint
from lmdeploy.quality import divergence
from lmdeploy.quality.behaviours import TEMPERATURE, Answer, ask, engine_plan, figures
from lmdeploy.quality.divergence import Positions
from lmdeploy.quality.figures import (
    OVERALL,
    ModelFigures,
    Report,
    TextFigures,
    uneven_domains,
)
from lmdeploy.quality.headers import bits_per_weight, input_rounding
from lmdeploy.quality.items import Item, built_in_items, read_items
from lmdeploy.quality.judge import Judgement, Pair, check_url, judge
from lmdeploy.quality.layers import LayerFigures, comparable, layer_figures
from lmdeploy.quality.loops import LEAST_TIMES, LEAST_TOKENS, LONGEST_PERIOD
from lmdeploy.quality.options import EvalOptions
from lmdeploy.quality.texts import Passages, Tokens, held_out_passages, texts_of, tokenised
from lmdeploy.runtime.resolve import RuntimeConfig
from lmdeploy.text.tokenizer import Tokenizer, load_tokenizer

Tell = Callable[[str, int, int], None]  # a step, how much of it is done, how much there is
_LAYER_WINDOWS = 1  # of each domain: errors of layers differ little between texts


@dataclass(frozen=True, slots=True)
class _Opened:
    name: str
    path: Path
    checkpoint: Checkpoint
    tokenizer: Tokenizer
    made: dict[str, Any] | None


@dataclass(frozen=True, slots=True)
class _Asked:
    """answers: None where the model could not be asked, and why."""

    config: RuntimeConfig | None = None
    answers: list[Answer] | None = None
    seconds: float = 0.0
    refused: str = ""


def compare(
    original: str | Path,
    others: Sequence[str | Path],
    options: EvalOptions | None = None,
    tell: Tell = lambda *_: None,
) -> Report:
    """Measure all. A model is a directory, a GGUF file or a hub id.

    Raises ConfigError and ModelError; what one model cannot be measured on is said in the report instead.
    """
    options, begin = options or EvalOptions(), time.monotonic()
    items = _items(options)
    check_options(options)
    with _opened([original, *others]) as models:
        length = min(options.seqlen, *(model.checkpoint.spec.max_position for model in models))
        passages = held_out_passages(models[0].tokenizer, options.texts, options.samples, length)
        tokens = [tokenised(passages, model.tokenizer) for model in models]
        texts = _text_figures(models, tokens, tell)
        layers = [_layers(models[0], model, tokens, options, tell) for model in models]
        asked = [_ask(model, items, options, tell) for model in models]
        found = [
            _model_figures(model, models[0], *texts[i], *layers[i], asked[i], asked[0], items)
            for i, model in enumerate(models)
        ]
    found = [_judged(m, a, asked[0], items, options, tell) for m, a in zip(found, asked, strict=True)]
    found = [replace(model, warnings=_warnings(found[0], model, options)) for model in found]
    settings = _settings(options, passages, tokens[0], items, time.monotonic() - begin)
    return Report(found, settings, items, [one.answers for one in asked] if items else [])


def check_options(options: EvalOptions) -> None:
    """ConfigError for files and an address that cannot be used, before any model is read."""
    _items(options)
    texts_of(options.texts)
    if options.judge is not None:
        check_url(options.judge)


def _items(options: EvalOptions) -> list[Item]:
    items = built_in_items() if options.behaviours else []
    return items + (read_items(options.eval_file) if options.eval_file else [])


@contextmanager
def _opened(models: Sequence[str | Path]) -> Iterator[list[_Opened]]:
    with ExitStack() as stack:
        found, names = [], list[str]()
        for model in models:
            path = resolve_model_path(str(model)).absolute()
            if is_packed(path):
                raise ConfigError(
                    f"{path} is in packed form, whose weights are not read; give the model it was made from,"
                    " which holds the same weights"
                )
            checkpoint = open_checkpoint(path)
            stack.callback(checkpoint.close)
            made = read_json(path / RECORD) if is_there(path / RECORD) else None
            names.append(_name(path, names))
            found.append(_Opened(names[-1], path, checkpoint, load_tokenizer(path), made))
        yield found


def _name(path: Path, taken: Sequence[str]) -> str:
    """Short, and one for each model."""
    parts = path.absolute().parts
    short = next((n for k in (1, 2, 3) if (n := "/".join(parts[-k:])) not in taken), None)
    return short or f"{path} ({len(taken) + 1})"


def _text_figures(
    models: Sequence[_Opened], tokens: Sequence[Tokens], tell: Tell
) -> list[tuple[dict[str, TextFigures], str]]:
    """Of each model by domain, and why KL is not given. Those that read the same ids go together."""
    first = models[0]
    refused = [_kl_refused(first, model, tokens[0], tokens[i]) for i, model in enumerate(models)]
    together = [i for i, reason in enumerate(refused) if not reason]
    checkpoints = [models[i].checkpoint for i in together]
    found: dict[int, Positions] = dict(
        zip(
            together,
            divergence.compare(checkpoints[0], checkpoints[1:], tokens[0].windows, tell),
            strict=True,
        )
    )
    for i, reason in enumerate(refused):
        if reason:
            found[i] = divergence.compare(models[i].checkpoint, [], tokens[i].windows, tell)[0]
    for i, model in enumerate(models):
        if not np.isfinite(found[i].loss).all():
            raise ModelError(
                f"{model.path}: its logits are not finite on the held-out text; it cannot be used"
            )
    return [(_by_domain(found[i], tokens[i]), refused[i]) for i in range(len(models))]


def _kl_refused(first: _Opened, model: _Opened, ours: Tokens, theirs: Tokens) -> str:
    sizes = [m.checkpoint.spec.vocab_size for m in (first, model)]
    if sizes[0] != sizes[1]:
        return f"its vocabulary has {sizes[1]} tokens, the original's {sizes[0]}: no comparison by token"
    if ours.windows != theirs.windows:
        return "its tokenizer cuts the text otherwise: no comparison by token"
    return ""


def _by_domain(positions: Positions, tokens: Tokens) -> dict[str, TextFigures]:
    ends = np.cumsum([0, *(len(ids) - 1 for ids in tokens.windows)])
    spans = {**tokens.spans, OVERALL: (0, len(tokens.windows))}
    return {
        domain: _figures(positions.of(slice(int(ends[a]), int(ends[b]))), sum(tokens.sizes[a:b]))
        for domain, (a, b) in spans.items()
    }


def _figures(positions: Positions, size: int) -> TextFigures:
    apart = positions.kl is not None
    return TextFigures(
        tokens=len(positions.loss),
        bytes=size,
        perplexity=positions.perplexity,
        bits_per_byte=float(positions.loss.sum() / np.log(2) / max(size, 1)),
        mean_kl=positions.mean_kl if apart else None,
        p99_kl=positions.p99_kl if apart else None,
        top1=positions.top1 if apart else None,
    )


def _layers(
    first: _Opened, model: _Opened, tokens: Sequence[Tokens], options: EvalOptions, tell: Tell
) -> tuple[list[LayerFigures], str]:
    if not options.layers or model is first:
        return [], ""
    reason = comparable(first.checkpoint, model.checkpoint)
    if reason:
        return [], reason
    chosen = [
        tokens[0].windows[i]
        for begin, end in tokens[0].spans.values()
        for i in range(begin, min(begin + _LAYER_WINDOWS, end))
    ]
    return layer_figures(first.checkpoint, model.checkpoint, chosen, tell), ""


def _ask(model: _Opened, items: Sequence[Item], options: EvalOptions, tell: Tell) -> _Asked:
    config = None
    try:
        config = engine_plan(model.path, model.checkpoint.spec.max_position)
        if not items:
            return _Asked(config)
        begin = time.monotonic()
        answers = ask(config, items, options.seed, tell)
        return _Asked(config, answers, time.monotonic() - begin)
    except LMDeployError as error:  # no engine here runs it; its other figures stand
        return _Asked(config, refused=error.message)


def _model_figures(
    model: _Opened,
    first: _Opened,
    texts: dict[str, TextFigures],
    kl_refused: str,
    layers: list[LayerFigures],
    layers_refused: str,
    asked: _Asked,
    original: _Asked,
    items: Sequence[Item],
) -> ModelFigures:
    behaviours = None
    if asked.answers is not None:
        behaviours = figures(items, asked.answers, original.answers or asked.answers, asked.seconds)
    return ModelFigures(
        name=model.name,
        path=str(model.path),
        format=model.checkpoint.model_format,
        disk_bytes=sum(file.stat().st_size for file in model.checkpoint.files),
        bits_per_weight=bits_per_weight(model.checkpoint),
        inputs=input_rounding(model.checkpoint),
        memory_bytes=asked.config.plan.weights if asked.config else None,
        memory_refused="" if asked.config else asked.refused,
        engine=asked.config.engine if asked.config else "",
        texts=texts,
        kl_refused="" if model is first else kl_refused,
        layers=layers,
        layers_refused=layers_refused,
        behaviours=behaviours,
        behaviours_refused=asked.refused if items else "",
        made=None if model.made is None else {k: model.made.get(k) for k in ("recipe", "data", "format")},
    )


def _judged(
    model: ModelFigures,
    asked: _Asked,
    original: _Asked,
    items: Sequence[Item],
    options: EvalOptions,
    tell: Tell,
) -> ModelFigures:
    if options.judge is None or asked is original or asked.answers is None or original.answers is None:
        return model
    pairs = []
    for item, ours, theirs in zip(items, original.answers, asked.answers, strict=True):
        if ours.text.strip() != theirs.text.strip() and not (ours.error or theirs.error):
            pairs.append(Pair(item.id, _question(item, ours), ours.text, theirs.text))
    found = judge(options.judge, pairs, tell) if pairs else Judgement(options.judge.model or "")
    return replace(model, judged=found)


def _question(item: Item, answer: Answer) -> str:
    """For the judge: what was said before, then what is to be answered."""
    before = [f"{m['role']}: {m['content']}" for m in item.before]
    for turn, said in zip(item.turns, answer.earlier, strict=False):
        before += [f"user: {turn}", f"assistant: {said}"]
    return "\n".join([*before, item.turns[-1]])


def _warnings(original: ModelFigures, model: ModelFigures, options: EvalOptions) -> list[str]:
    if model is original:
        return []
    found = uneven_domains(original, model)
    if model.inputs == "other":
        found.append(
            "its files mean what matrices are fed to be rounded in a way that is not computed here: text and"
            " layers are measured with its weights alone"
        )
    data = json.dumps((model.made or {}).get("data"), ensure_ascii=False)
    found += [
        f"{file} is among the texts this model was calibrated on: its figures are too good"
        for file in options.texts
        if Path(file).name in data
    ]
    if model.behaviours and model.behaviours.failed:
        found.append(f"{model.behaviours.failed} questions could not be asked")
    return found


def _settings(
    options: EvalOptions, passages: Passages, tokens: Tokens, items: Sequence[Item], seconds: float
) -> dict[str, Any]:
    return {
        "command": options.command,
        "lmdeploy": __version__,
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "machine": f"{platform.machine()}, {torch.get_num_threads()} threads",
        "date": time.strftime("%Y-%m-%d %H:%M:%S"),
        "seconds": round(seconds, 1),
        "text": passages.source,
        "text_sha256": passages.sha256,
        "windows": {domain: end - begin for domain, (begin, end) in tokens.spans.items()},
        "samples": options.samples,
        "seqlen": options.seqlen,
        "items": len(items),
        "seed": options.seed,
        "temperature": TEMPERATURE,
        "loop": f"the same 1 to {LONGEST_PERIOD} tokens at least {LEAST_TIMES} times in a row without a"
        f" change, {LEAST_TOKENS} tokens or more",
        "judge": _without_secrets(options.judge.url) if options.judge else "",
    }


def _without_secrets(url: str) -> str:
    parts = urlsplit(url)
    return parts._replace(netloc=parts.netloc.rpartition("@")[2], query="").geturl()
