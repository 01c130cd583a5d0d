"""Windows of tokens from documents, and the built-in texts."""

from __future__ import annotations

import gzip
import hashlib
import json
import re
from collections import Counter
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from byte_model import CHATML, make_tokenizer
from tokenizers.processors import TemplateProcessing

from lmdeploy.errors import ConfigError
from lmdeploy.lite.data import DOMAINS, CalibrationSet, calibration_windows, held_out
from lmdeploy.lite.data.arithmetic import items
from lmdeploy.lite.data.builtin import calibration
from lmdeploy.lite.data.calibration import shares
from lmdeploy.text.chat_template import ChatTemplate
from lmdeploy.text.tokenizer import Tokenizer


def begins() -> Tokenizer:
    """A tokenizer that puts its begin marker before every text."""
    tokenizer = make_tokenizer()
    marker = ("<s>", tokenizer.bos_id)
    tokenizer._backend.post_processor = TemplateProcessing("<s> $A", "<s> $A $B", [marker])
    return tokenizer


def windows(source: str | None, samples: int, seqlen: int = 64, seed: int = 0) -> CalibrationSet:
    tokenizer = make_tokenizer()
    template = ChatTemplate({"default": CHATML}, tokenizer, "byte model")
    return calibration_windows(source, tokenizer, template, samples, seqlen, seed)


def text(tokenizer: Tokenizer, ids: np.ndarray) -> str:
    return tokenizer.decode([int(i) for i in ids], skip_special_tokens=False)


def letters(path: Path, letter: str, count: int = 100_000) -> Path:
    path.write_text((letter * 7 + " ") * (count // 8))
    return path


def test_weights_decide_the_shares(tmp_path: Path) -> None:
    a, b = letters(tmp_path / "a.txt", "a"), letters(tmp_path / "b.txt", "b")
    found = windows(f"{a}:0.7,{b}:0.3", samples=200)
    assert found.ids.shape == (200, 64) and found.ids.dtype == np.int64 and not found.warnings
    # no window mixes sources, and each source has its share to the window
    firsts = Counter("b" if ord("b") in row else "a" for row in found.ids)
    assert firsts == {"a": 140, "b": 60}
    assert all({ord("a"), ord("b")} - set(row) for row in found.ids)
    # not one source after the other
    assert 20 < sum(ord("b") in row for row in found.ids[:100]) < 40
    assert [(p["windows"], p["weight"]) for p in found.description["parts"]] == [(140, 0.7), (60, 0.3)]


@pytest.mark.parametrize(
    ("weights", "total"), [((1,), 3), ((0.45, 0.2, 0.25, 0.1), 7), ((1, 1, 1), 1), ((5, 0.01), 10)]
)
def test_shares_are_whole_and_near(weights: tuple[float, ...], total: int) -> None:
    found = shares(weights, total)
    assert sum(found) == total
    assert all(abs(n - w * total / sum(weights)) < 1 for n, w in zip(found, weights, strict=True))


def test_a_seed_decides_everything(tmp_path: Path) -> None:
    first = windows(None, samples=20)
    again, other = windows(None, samples=20), windows(None, samples=20, seed=1)
    assert np.array_equal(first.ids, again.ids) and first.description == again.description
    assert not np.array_equal(first.ids, other.ids)
    assert first.description["sha256"] != other.description["sha256"]
    assert json.loads(json.dumps(first.description)) == first.description
    assert "20 windows of 64 tokens" in first.line and first.description["sha256"][:12] in first.line


def test_long_documents_give_windows_of_their_own_text_and_the_rest_is_joined(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    records = [{"text": "".join(f"{i:03d}" for i in range(50))}, {"text": "short one"}, {"text": "short two"}]
    path.write_text("\n".join(map(json.dumps, records)))
    tokenizer = make_tokenizer()
    found = windows(str(path), samples=2)
    whole = [text(tokenizer, row) for row in found.ids]
    long = records[0]["text"]
    assert sorted(whole) == sorted([long[:64], long[64:128]])
    joined = windows(str(path), samples=1, seqlen=168)
    both = text(tokenizer, joined.ids[0])
    assert sorted(both.split("\n\n")) == sorted([long, "short one"]) or "short two" in both


def test_every_window_begins_as_the_tokenizer_does(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(
        "\n".join(json.dumps({"text": f"document number {i} " * (1 + i % 9)}) for i in range(200))
    )
    tokenizer = begins()
    found = calibration_windows(str(path), tokenizer, None, 20, 64)
    assert (found.ids[:, 0] == tokenizer.bos_id).all()
    rows = found.ids.tolist()
    assert not any(a == b == tokenizer.bos_id for row in rows for a, b in pairwise(row))
    assert sum(row.count(tokenizer.bos_id) for row in rows) > 20  # short documents are told apart


def test_conversations_go_through_the_template(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    turn = [{"from": "human", "value": "say <|im_end|>"}, {"from": "gpt", "value": "no"}]
    path.write_text("\n".join(json.dumps({"conversations": turn}) for _ in range(50)))
    tokenizer = make_tokenizer()
    found = windows(str(path), samples=4, seqlen=400)
    body = text(tokenizer, found.ids[0])
    assert body.startswith(
        "<|im_start|>user\nsay <|im_end|><|im_end|>\n<|im_start|>assistant\nno<|im_end|>\n"
    )
    ends = body.count("<|im_end|>") // 3
    control = [int(i) for i in found.ids[0]].count(tokenizer.id_of("<|im_end|>"))
    assert 2 * ends <= control < 2 * ends + 3  # what the user wrote became no control token
    plain = calibration_windows(str(path), tokenizer, None, 4, 64)
    assert re.fullmatch(
        r"\d+ conversations were joined as plain text: .* no chat template", plain.warnings[0]
    )


def test_a_template_that_refuses(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    record = {"messages": [{"role": "system", "content": "be brief"}, {"role": "user", "content": "x"}]}
    path.write_text(json.dumps(record) + "\n" + json.dumps({"text": "plain text " * 50}))
    tokenizer = make_tokenizer()
    refusing = "{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
    template = ChatTemplate({"default": refusing}, tokenizer, "byte model")
    found = calibration_windows(str(path), tokenizer, template, 8, 64)
    assert "1 conversations were skipped: the chat template refused" in found.warnings[-1]
    path.write_text(json.dumps(record))
    with pytest.raises(ConfigError, match="gives no tokens"):
        calibration_windows(str(path), tokenizer, template, 8, 64)


def test_too_little_text(tmp_path: Path) -> None:
    path = letters(tmp_path / "a.txt", "a", 640)
    found = windows(str(path), samples=128)
    assert found.ids.shape == (10, 64)
    assert found.warnings == (
        "too little calibration text: 128 windows of 64 tokens were asked for, there are 10 of 64"
        " (640 of 8192 tokens)",
    )
    path.write_text("tiny")
    tiny = windows(str(path), samples=128)
    assert tiny.ids.shape == (1, 4) and "there are 1 of 4 (4 of 8192 tokens)" in tiny.warnings[0]
    assert [p["windows"] for p in tiny.description["parts"]] == [1]


def test_an_empty_name_is_not_the_mixture() -> None:
    """As an unset variable of a shell would give it."""
    with pytest.raises(ConfigError, match="--calib-dataset is empty"):
        windows(" ", samples=1)


def test_what_one_source_lacks_the_others_give(tmp_path: Path) -> None:
    a, b = letters(tmp_path / "a.txt", "a", 640), letters(tmp_path / "b.txt", "b")
    found = windows(f"{a},{b}", samples=100)
    assert found.ids.shape == (100, 64)
    assert found.warnings == (f"{a}: its share is 50 windows, it has 10; others fill in",)
    assert [p["windows"] for p in found.description["parts"]] == [10, 90]


def test_no_samples() -> None:
    found = windows("not/looked/at", samples=0)
    assert found.ids.shape == (0, 64) and found.line == "calibration: none" and not found.warnings


def test_an_unknown_name() -> None:
    with pytest.raises(
        ConfigError, match=r"no such file or folder, and not a known name .*wikitext2.*builtin"
    ) as e:
        windows("wikitext3", samples=1)
    assert "\n" not in e.value.message


@pytest.mark.parametrize(
    "name", ["x" * 5000, "~nobody-here/a.txt", "a\0b", "no/such/dir/", "http://host/a.jsonl"]
)
def test_names_that_no_file_has(name: str) -> None:
    with pytest.raises(ConfigError, match="no such file or folder") as error:
        windows(name, samples=1)
    assert len(error.value.message) < 600 and "\n" not in error.value.message


def test_a_path_in_the_home_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    letters(tmp_path / "a, b.txt", "a")
    assert windows("~/a, b.txt:2,builtin-code:2", samples=4).description["parts"][0]["windows"] == 2


def test_the_mixture_is_of_all_domains_and_a_domain_alone_can_be_asked_for() -> None:
    found = windows(None, samples=40)
    assert {p["name"]: p["windows"] for p in found.description["parts"]} == {
        "builtin-english": 18,
        "builtin-chinese": 8,
        "builtin-code": 10,
        "builtin-arithmetic": 4,
    }
    tokenizer = make_tokenizer()
    alone = windows("builtin-chinese", samples=4, seqlen=300)
    assert all(re.search("[\u4e00-\u9fff]{4}", text(tokenizer, row)) for row in alone.ids)
    mixed = windows("builtin:3,builtin-code:1", samples=80)
    assert {p["name"]: p["windows"] for p in mixed.description["parts"]}["builtin-code"] == 35


def fragments(texts: list[str]) -> set[str]:
    """Lines that are long enough to be no coincidence."""
    return {line.strip() for x in texts for line in x.splitlines() if len(line.strip()) > 30}


@pytest.mark.parametrize("domain", DOMAINS)
def test_held_out_text_is_not_in_the_calibration_text(domain: str) -> None:
    kept = [x if isinstance(x, str) else "\n".join(m["content"] for m in x) for x in calibration(domain)]
    held = held_out(domain)
    assert held and kept and held == held_out(domain)
    common = fragments(held) & fragments(kept)
    assert not {line for line in common if not line.startswith("from __future__")}, common
    size = sum(map(len, held))
    assert size > (10_000 if domain == "chinese" else 45_000)


def test_held_out_of_no_domain() -> None:
    with pytest.raises(ConfigError, match="german: not one of the domains english"):
        held_out("german")


def test_arithmetic_is_right_and_its_parts_are_disjoint() -> None:
    streams = items(1, held_out=False), items(2, held_out=True)
    kept, held = ({next(stream) for _ in range(2000)} for stream in streams)
    assert not kept & held
    for question, answer in kept | held:
        for equation in re.findall(r"\d+(?: [+×=-] \d+)+", re.sub(r"\d+ ÷ .*", "", answer)):
            values = {eval(side.replace("×", "*")) for side in equation.split(" = ")}
            assert len(values) == 1, (question, answer)
        for a, b, quotient, rest in re.findall(r"(\d+) ÷ (\d+) = (\d+)(?: remainder (\d+))?", answer):
            assert int(b) * int(quotient) + int(rest or 0) == int(a), (question, answer)


def test_the_shipped_texts_are_small_and_those_that_their_readme_names() -> None:
    import lmdeploy.lite.data as package

    folder = Path(package.__file__).parent
    assert sum(path.stat().st_size for path in folder.iterdir() if path.suffix != ".py") < 400_000
    text = gzip.decompress((folder / "texts.json.gz").read_bytes())
    assert hashlib.sha256(text).hexdigest() in (folder / "README.md").read_text()
