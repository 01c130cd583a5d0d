"""The whole comparison on tiny models: every figure beside transformers in float64 and NumPy."""

from __future__ import annotations

import json
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from browser import browser_page, needs_browser
from quality_models import change, write_disturbed, write_original
from transformers import AutoModelForCausalLM

from lmdeploy.errors import ConfigError, ModelError
from lmdeploy.models.registry import open_checkpoint
from lmdeploy.quality import report as report_module
from lmdeploy.quality.figures import OVERALL, Report, uneven_domains
from lmdeploy.quality.options import EvalOptions
from lmdeploy.quality.report import compare
from lmdeploy.quality.table import tables

TEXTS = {
    "prose": "It was a bright cold day in April, and the clocks were striking. " * 8,
    "signs": "".join(f"x{i} = {i} * {i + 1};  # <b>&amp;\n" for i in range(40)),
}
NUMBERS = EvalOptions(samples=3, seqlen=64, behaviours=False)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("models")
    found = []
    for name, by in (("small", 0.02), ("large", 0.3)):
        (folder / name).mkdir()
        found.append(write_disturbed(folder / name, by))
    (folder / "first").mkdir()
    return [write_original(folder / "first"), *found]


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    folder = tmp_path_factory.mktemp("texts")
    for name, text in TEXTS.items():
        (folder / f"{name}.txt").write_text(text)
    return tuple(str(folder / f"{name}.txt") for name in TEXTS)


@pytest.fixture(scope="module")
def found(models: list[Path], texts: tuple[str, ...]) -> Report:
    return compare(models[0], models[1:], replace(NUMBERS, texts=texts))


def log_softmax(logits: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    shifted = logits - logits.max(-1, keepdims=True)
    return np.asarray(shifted - np.log(np.exp(shifted).sum(-1, keepdims=True)))


def windows_of(text: str, models: list[Path]) -> list[list[int]]:
    """64 bytes of text each (the tokenizer has one token for each byte), three of them."""
    from lmdeploy.text.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(models[0])
    parts = [text[i : i + 64] for i in range(0, 192, 64)]
    return [tokenizer.encode(part, add_special_tokens=True) for part in parts]


def test_figures_by_domain(models: list[Path], found: Report) -> None:
    loaded = [AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64) for path in models]
    everything: list[list[np.ndarray[Any, Any]]] = [[], [], []]
    for domain, text in TEXTS.items():
        loss, kl, agrees = ([[], [], []] for _ in range(3))  # type: ignore[var-annotated]
        for ids in windows_of(text, models):
            with torch.no_grad():
                logs = [log_softmax(model(torch.tensor([ids])).logits[0, :-1].numpy()) for model in loaded]
            for i, log in enumerate(logs):
                loss[i] += [-log[j, ids[j + 1]] for j in range(len(ids) - 1)]
                kl[i] += (np.exp(logs[0]) * (logs[0] - log)).sum(-1).tolist()
                agrees[i] += (log.argmax(-1) == logs[0].argmax(-1)).tolist()
        for i, model in enumerate(found.models):
            figures = model.texts[domain]
            assert figures.tokens == len(loss[i]) and figures.bytes == len(loss[i])
            assert np.isclose(figures.perplexity, np.exp(np.mean(loss[i])), rtol=1e-4)
            assert np.isclose(figures.bits_per_byte, np.mean(loss[i]) / np.log(2), rtol=1e-4)
            everything[i].append(np.asarray([loss[i], kl[i]]))
            if i:
                assert figures.mean_kl is not None and figures.p99_kl is not None
                assert np.isclose(figures.mean_kl, np.mean(kl[i]), rtol=1e-3, atol=1e-7)
                assert np.isclose(figures.p99_kl, np.quantile(kl[i], 0.99), rtol=1e-2, atol=1e-6)
                assert figures.top1 == pytest.approx(np.mean(agrees[i]), abs=1.5 / len(agrees[i]))
            else:
                assert figures.mean_kl is None and figures.top1 is None
    for i, model in enumerate(found.models):
        loss_all, kl_all = np.concatenate(everything[i], 1)
        assert np.isclose(model.overall.perplexity, np.exp(loss_all.mean()), rtol=1e-4)
        assert i == 0 or np.isclose(model.overall.mean_kl or 0, kl_all.mean(), rtol=1e-3)
    kls = [model.overall.mean_kl or 0.0 for model in found.models]
    assert kls[2] > 10 * kls[1] > 0


def test_errors_of_layers(models: list[Path], found: Report) -> None:
    """From transformers' own layers and hidden states."""
    first, second = (
        AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64) for path in (models[0], models[2])
    )
    layers = found.models[2].layers
    assert len(layers) == first.config.num_hidden_layers
    chosen = [windows_of(text, models)[0] for text in TEXTS.values()]
    sums = np.zeros((len(layers), 4))
    for ids in chosen:
        with torch.no_grad():
            states = [
                model.model(torch.tensor([ids]), output_hidden_states=True).hidden_states
                for model in (first, second)
            ]
            positions = torch.arange(len(ids))[None]
            turns = first.model.rotary_emb(states[0][0], positions)
            mask = torch.full((len(ids), len(ids)), -torch.inf, dtype=torch.float64).triu(1)[None, None]
            x, z = states[0][0], states[1][0]
            for i in range(len(layers)):
                y, own, z = (
                    model.model.layers[i](s, attention_mask=mask, position_embeddings=turns)
                    for model, s in ((first, x), (second, x), (second, z))
                )
                pairs = ((own - y), (y - x), (z - y), y)
                sums[i] += [float(p.pow(2).sum()) for p in pairs]
                x = y
    for layer, (own, scale, carried, total) in zip(layers, sums, strict=True):
        assert layer.own == pytest.approx(own / scale, rel=1e-3)
        assert layer.carried == pytest.approx(carried / total, rel=1e-3)
        for matrix in layer.matrices:
            assert matrix.measured == "weights" and matrix.bits_per_weight == 32
            assert matrix.error == pytest.approx(0.09, rel=0.2)  # noise of 0.3 of the deviation


def test_saved_errors_are_taken(models: list[Path], texts: tuple[str, ...], tmp_path: Path) -> None:
    write_disturbed(tmp_path, 0.02)
    checkpoint = open_checkpoint(tmp_path)
    names = [x.name.removeprefix("layers.0.") for x in checkpoint.spec.linears(0)]
    saved = [
        {
            "matrices": [{"name": n, "bits_per_weight": 4.0, "error": 0.125, "note": ""} for n in names],
            "notes": [],
        }
        for _ in checkpoint.spec.layers
    ]
    record = {"layers": saved, "recipe": {"method": "awq"}, "data": {"files": [texts[0]]}}
    (tmp_path / "lmdeploy_lite.json").write_text(json.dumps(record))
    other = compare(models[0], [tmp_path], replace(NUMBERS, texts=texts)).models[1]
    assert {(m.error, m.measured) for layer in other.layers for m in layer.matrices} == {(0.125, "output")}
    assert any("prose.txt is among the texts this model was calibrated on" in w for w in other.warnings)
    assert not any("signs.txt" in w for w in other.warnings)
    (tmp_path / "lmdeploy_lite.json").write_text('{"layers": [3]}')
    with pytest.raises(ModelError, match=r"lmdeploy_lite\.json is not what a quantisation writes"):
        compare(models[0], [tmp_path], replace(NUMBERS, texts=texts))


def test_another_tokenizer(models: list[Path], texts: tuple[str, ...], tmp_path: Path) -> None:
    """Perplexity per byte stays, KL is refused with the reason."""
    write_original(tmp_path)
    tokenizer = json.loads((tmp_path / "tokenizer.json").read_text())
    vocab = tokenizer["model"]["vocab"]
    first, second = (next(t for t, i in vocab.items() if i == n) for n in (65, 66))
    vocab[first], vocab[second] = vocab[second], vocab[first]
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    options = replace(NUMBERS, texts=texts)
    (tmp_path.parent / "ab.txt").write_text("ABBA BAB " * 40)
    other = compare(models[0], [tmp_path], replace(options, texts=(str(tmp_path.parent / "ab.txt"),))).models[
        1
    ]
    assert "tokenizer cuts the text otherwise" in other.kl_refused
    assert other.overall.mean_kl is None and other.overall.bits_per_byte > 0
    assert other.layers  # shapes are equal: layers are compared on the original's ids


def test_another_shape_is_refused_by_name(models: list[Path], texts: tuple[str, ...], tmp_path: Path) -> None:
    write_original(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["vocab_size"] += 4
    (tmp_path / "config.json").write_text(json.dumps(config))
    change(
        tmp_path,
        lambda name, v: np.concatenate([v, v[:4]]) if "embed" in name or "lm_head" in name else v,
    )
    other = compare(models[0], [tmp_path], replace(NUMBERS, texts=texts)).models[1]
    assert "its vocabulary has" in other.kl_refused and "vocab size is" in other.layers_refused
    assert other.overall.bits_per_byte > 0


def test_a_model_that_overflows_is_named(models: list[Path], texts: tuple[str, ...], tmp_path: Path) -> None:
    write_original(tmp_path)
    change(tmp_path, lambda name, v: v * np.float32(1e38) if "lm_head" in name else v)
    with pytest.raises(ModelError, match="its logits are not finite"):
        compare(models[0], [tmp_path], replace(NUMBERS, texts=texts))


def test_one_model_alone(models: list[Path], texts: tuple[str, ...], tmp_path: Path) -> None:
    alone = compare(models[0], [], replace(NUMBERS, texts=texts))
    assert len(alone.models) == 1 and alone.original.overall.perplexity > 1
    alone.write(tmp_path)
    assert json.loads((tmp_path / "quality.json").read_text())["models"][0]["format"] == "hf"


def test_sizes(models: list[Path], found: Report) -> None:
    for path, model in zip(models, found.models, strict=True):
        on_disk = sum(f.stat().st_size for f in path.glob("*.safetensors"))
        assert on_disk <= model.disk_bytes < on_disk + 100_000
        assert model.memory_bytes and model.bits_per_weight == 32


def test_a_domain_that_loses_more_is_named(found: Report) -> None:
    original, other = found.models[0], found.models[2]
    texts = {name: replace(other.texts[OVERALL], mean_kl=0.01, bits_per_byte=1.0) for name in "abcd"}
    texts["c"] = replace(texts["c"], mean_kl=0.05)
    first = {name: replace(text, mean_kl=None) for name, text in texts.items()}
    before, after = replace(original, texts=first), replace(other, texts=texts)
    lines = uneven_domains(before, after)
    assert len(lines) == 1 and lines[0].startswith("c: loses 2.5 x the mean")
    texts["c"] = replace(texts["c"], mean_kl=0.029)
    assert not uneven_domains(before, replace(other, texts=texts))
    texts["d"] = replace(texts["d"], bits_per_byte=1.2)
    assert [line[:8] for line in uneven_domains(before, replace(other, texts=texts))] == ["d: loses"]


class Page(HTMLParser):
    """Every tag closed in order; what it links to; its text."""

    void = frozenset({"meta", "br"})

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.outside: list[str] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.outside += [str(v) for k, v in attrs if k in ("src", "href", "data", "action", "srcset")]
        self.outside += [k for k, _ in attrs if k.startswith("on")]
        if tag not in self.void:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def read_page(path: Path) -> Page:
    page = Page()
    page.feed(path.read_text(encoding="utf-8"))
    page.close()
    assert not page.open and not page.outside
    assert not {"script", "link", "iframe", "img", "object", "base"} & set(page.tags)
    return page


@needs_browser
async def test_the_page_in_a_browser(found: Report, tmp_path: Path) -> None:
    """A model has one colour in every chart; nothing is cut off or too small to read, also on a phone."""
    _, html = found.write(tmp_path)
    keys = """[...document.querySelectorAll('.key')].map((key) =>
        [key.textContent, getComputedStyle(key, ':before').backgroundColor])"""
    drawn = "new Set([...document.querySelectorAll('rect')].map((one) => getComputedStyle(one).fill)).size"
    letters = """Math.min(...[...document.querySelectorAll('svg text')].map((text) =>
        text.getScreenCTM().a * parseFloat(getComputedStyle(text).fontSize)))"""
    for width in (390, 1200):
        async with browser_page(viewport={"width": width, "height": 900}) as page:
            await page.goto(html.as_uri())
            await page.evaluate("document.querySelectorAll('details').forEach((one) => { one.open = true })")
            assert await page.evaluate("document.documentElement.scrollWidth") == width
            assert await page.evaluate(letters) >= 8
            colours = await page.evaluate(keys)
            of_models = dict(colours)
            assert len(colours) > len(of_models) == len(set(of_models.values())) == 2
            assert all(of_models[name] == colour for name, colour in colours)
            assert await page.evaluate(drawn) == 2


def test_json_and_page(found: Report, tmp_path: Path) -> None:
    where, html = found.write(tmp_path / "new" / "folder")
    values = json.loads(where.read_text(encoding="utf-8"))
    for model, saved in zip(found.models, values["models"], strict=True):
        assert saved["texts"]["signs"]["perplexity"] == model.texts["signs"].perplexity
        assert len(saved["layers"]) == len(model.layers)
    assert values["settings"]["seqlen"] == 64 and values["settings"]["text_sha256"]
    page = read_page(html)
    for _, heads, rows in tables(found):
        for cell in [*heads, *(cell for row in rows for cell in row)]:
            assert cell in page.text
    assert page.tags.count("svg") == 4 and "prefers-color-scheme:dark" in html.read_text()
    assert "url(" not in html.read_text() and "http" not in html.read_text().replace("http://www.w3.org", "")
    assert [p.name for p in where.parent.iterdir()].count("quality.html") == 1
    assert not list(where.parent.glob("*.partial"))


def test_questions_are_asked_and_shown(models: list[Path], texts: tuple[str, ...], tmp_path: Path) -> None:
    """Through the engine: equal models answer alike, answers are escaped on the page."""
    file = tmp_path / "own.jsonl"
    lines = [
        {"prompt": "<script>alert(1)</script>", "max_tokens": 40, "json_schema": {}},
        {
            "messages": [{"role": "system", "content": "&lt;"}, {"role": "user", "content": "x"}],
            "max_tokens": 8,
        },
        {"prompt": "y" * 5000, "max_tokens": 8},
    ]
    file.write_text("\n".join(map(json.dumps, lines)))
    options = replace(NUMBERS, texts=texts, eval_file=str(file), layers=False, seed=3)
    said = []
    found = compare(
        models[0], [models[0], models[2]], options, lambda step, done, work: said.append((step, done, work))
    )
    same, other = found.models[1].behaviours, found.models[2].behaviours
    assert same and other
    assert same.groups["own questions"].same == 2 and same.failed == 1  # the third is too long
    assert (same.json, same.invalid_json, same.items) == (1, 1, 3)
    assert found.answers[0] == found.answers[1] != found.answers[2]
    assert any("1 questions could not be asked" in w for w in found.models[2].warnings)
    assert ("answers", 6, 6) in said
    found.table()
    page = read_page(found.write(tmp_path)[1])
    assert "<script>alert(1)</script>" in page.text and "loops at 0.7" in page.text


def test_what_the_judge_is_asked(
    models: list[Path], texts: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only about answers that differ; a dead judge leaves the report whole."""
    from lmdeploy.quality.options import JudgeOptions

    file = tmp_path / "own.jsonl"
    file.write_text("\n".join(json.dumps({"prompt": f"question {i}", "max_tokens": 20}) for i in range(3)))
    asked = []
    whole = report_module.judge
    monkeypatch.setattr(report_module, "judge", lambda o, pairs, t: asked.append(pairs) or whole(o, pairs, t))
    options = replace(
        NUMBERS,
        texts=texts,
        eval_file=str(file),
        layers=False,
        judge=JudgeOptions("http://user:secret@127.0.0.1:9", "m", timeout=2),
    )
    found = compare(models[0], [models[0], models[2]], options)
    assert [[p.question for p in pairs] for pairs in asked] == [[f"question {i}" for i in range(3)]]
    judged = found.models[2].judged
    assert judged and sum(judged.failures.values()) + judged.not_asked == 3
    text = found.write(tmp_path)[0].read_text() + found.write(tmp_path)[1].read_text()
    assert "secret" not in text and "no connection" in text


def test_mistakes_are_one_line(models: list[Path], tmp_path: Path) -> None:
    empty = tmp_path / "empty.txt"
    empty.write_text("\n")
    for texts, said in (
        ((str(tmp_path / "none.txt"),), "cannot be read: No such file"),
        ((str(empty),), "no passage of 16 tokens"),
    ):
        with pytest.raises(ConfigError, match=said):
            compare(models[0], [], replace(NUMBERS, texts=texts))
    lines = tmp_path / "t.jsonl"
    lines.write_text('{"content": "a"}')
    with pytest.raises(ConfigError, match=r"line 1: no field 'text' \(there is: content\)"):
        compare(models[0], [], replace(NUMBERS, texts=(str(lines),)))
    for wrong in (dict(samples=0), dict(seqlen=4)):
        with pytest.raises(ConfigError):
            replace(NUMBERS, **wrong)
