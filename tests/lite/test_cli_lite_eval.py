"""Flags of `lmdeploy lite eval` and of the report that ends a quantisation."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from quality_models import write_disturbed, write_original

from lmdeploy.cli.lite_eval import conclude, eval_options
from lmdeploy.cli.main import build_parser, main


def test_flags_become_options(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "k")
    words = "lite eval a b c --eval-samples 2 --eval-seqlen 64 --eval-text t u --eval-file f --no-layers"
    words += " --eval-seed 5 --judge http://h --judge-model m --judge-timeout 3 --no-behaviours"
    args = build_parser().parse_args(words.split())
    options = eval_options(args)
    assert (args.original, args.others) == ("a", ["b", "c"])
    assert (options.samples, options.seqlen, options.texts, options.seed) == (2, 64, ("t", "u"), 5)
    assert (options.behaviours, options.layers, options.eval_file) == (False, False, "f")
    judge = options.judge
    assert judge and (judge.url, judge.model, judge.timeout, judge.key) == ("http://h", "m", 3.0, "k")


def test_quantising_commands_have_them_too() -> None:
    args = build_parser().parse_args(["lite", "auto_awq", "m", "--eval-samples", "3", "--no-behaviours"])
    assert eval_options(args).samples == 3 and not eval_options(args).behaviours and not args.no_report


def measured(tmp_path: Path) -> list[str]:
    """Two models, and a text in place of the built-in one."""
    for name, write in (("a", write_original), ("b", lambda folder: write_disturbed(folder, 0.1))):
        (tmp_path / name).mkdir()
        write(tmp_path / name)
    (tmp_path / "text.txt").write_text("The quick brown fox jumps over the lazy dog. " * 9)
    flags = ["--eval-text", str(tmp_path / "text.txt"), "--eval-samples", "2", "--eval-seqlen", "32"]
    return [*flags, "--no-behaviours"]


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = measured(tmp_path)
    models = [str(tmp_path / name) for name in "ab"]
    assert main(["lite", "eval", *models, *flags, "--work-dir", str(tmp_path / "out")]) == 0
    said = capsys.readouterr().out
    values = json.loads((tmp_path / "out" / "quality.json").read_text())
    kl = values["models"][1]["texts"]["all"]["mean_kl"]
    assert kl > 0 and f"{kl:.4f}" in said and "mean KL" in said
    assert (tmp_path / "out" / "quality.html").is_file() and str(tmp_path / "out") in said


def test_the_end_of_a_quantisation(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = measured(tmp_path)
    words = ["lite", "auto_awq", str(tmp_path / "a"), *flags]
    conclude(build_parser().parse_args([*words, "--no-report"]), tmp_path / "a", tmp_path / "b")
    assert not (tmp_path / "b" / "quality.json").exists() and not capsys.readouterr().out
    conclude(build_parser().parse_args(words), tmp_path / "a", tmp_path / "b")
    assert (tmp_path / "b" / "quality.json").is_file() and "mean KL" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--eval-samples", "0"], "--eval-samples is 0"),
        (["--eval-seqlen", "3"], "--eval-seqlen is 3"),
        (["--judge", "http://h", "--no-behaviours"], "--judge compares answers"),
        (["--judge", "http://h", "--judge-timeout", "0"], "--judge-timeout is 0"),
        (["--judge", "h"], "a URL such as"),
        (["--eval-file", "none.jsonl"], "cannot be read"),
    ],
)
def test_mistakes_are_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: list[str], said: str
) -> None:
    (tmp_path / "a").mkdir()
    write_original(tmp_path / "a")
    assert main(["lite", "eval", str(tmp_path / "a"), *flags]) == 2
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1


def test_without_torch_the_extra_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import builtins
    import sys

    whole = builtins.__import__

    def refuse(name: str, *args: Any, **more: Any) -> Any:
        if name == "torch":
            raise ModuleNotFoundError("No module named 'torch'", name="torch")
        return whole(name, *args, **more)

    for name in [n for n in sys.modules if n.startswith("lmdeploy.quality") or n == "torch"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(builtins, "__import__", refuse)
    assert main(["lite", "eval", "a"]) == 2
    assert "pip install 'lmdeploy[lite]'" in capsys.readouterr().err


def test_a_quantisation_with_its_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """On the built-in held-out text; a second run replaces the result with its report."""
    (tmp_path / "a").mkdir()
    write_original(tmp_path / "a")
    words = ["lite", "auto_awq", str(tmp_path / "a"), "--work-dir", str(tmp_path / "w")]
    words += ["--w-group-size", "32", "--calib-samples", "4", "--calib-seqlen", "32"]
    words += ["--eval-samples", "1", "--eval-seqlen", "32", "--no-behaviours"]
    for more in ([], ["--force"]):
        assert main([*words, *more]) == 0
        said = capsys.readouterr().out
        assert "built-in held-out texts" in said and "mean KL" in said
    values = json.loads((tmp_path / "w" / "quality.json").read_text())
    first, second = values["models"]
    assert set(second["texts"]) == {"english", "chinese", "code", "arithmetic", "all"}
    assert first["texts"]["chinese"]["tokens"] > 0 and second["texts"]["all"]["mean_kl"] > 0
    assert second["format"] == "awq" and second["made"]["recipe"]["method"]
    errors = {m["measured"] for layer in second["layers"] for m in layer["matrices"]}
    assert errors == {"output"}
    assert second["bits_per_weight"] < 6 and second["memory_bytes"] < first["memory_bytes"]
