"""The command line: what it answers to old commands, wrong flags and errors; flags made from fields."""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import lmdeploy
from lmdeploy import GenerationConfig, TurbomindEngineConfig
from lmdeploy.cli import check_env
from lmdeploy.cli.flags import add_flags, from_args, normalise
from lmdeploy.cli.main import build_parser, main
from lmdeploy.config import is_fixed
from lmdeploy.errors import CapacityError, ConfigError, EngineError, ModelError

ROOT = Path(__file__).resolve().parents[2]


def outcome(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str]:
    """(exit code, standard error) of a command that fails."""
    code = main(argv)
    out, err = capsys.readouterr()
    assert out == ""
    return code, err


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    for flag in ("--version", "-v"):
        with pytest.raises(SystemExit) as caught:
            main([flag])
        assert caught.value.code == 0
        assert capsys.readouterr().out == f"lmdeploy {lmdeploy.__version__}\n"


def test_version_is_that_of_the_package() -> None:
    text = (ROOT / "pyproject.toml").read_text()
    assert f'\nversion = "{lmdeploy.__version__}"\n' in text


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["convert", "./m"], "the folder to write is missing: lmdeploy convert ./m DIR"),
        (["list"], "`lmdeploy check_env` lists the model families"),
        (["serve", "gradio", "./m"], "`lmdeploy serve gradio` does not exist"),
        (["serve", "api_client", "http://x"], "any OpenAI client"),
        (["serve", "triton_client"], "any OpenAI client"),
        (["chat", "turbomind", "./m"], "write `lmdeploy chat MODEL`"),
        (["lite", "kv_qparams", "./m"], "needs no file: serve or chat with --quant-policy 8 or 4"),
        (
            ["chat", "./m", "--device", "cuda"],
            "--device belongs to the pytorch engine: add --backend",
        ),
        (["chat", "./m", "--dllm-block-length=4"], "diffusion language models only"),
        (
            ["chat", "./m", "--speculative-algorithm", "ngram", "--speculative-draft-model", "d"],
            "takes no model",
        ),
        (["chta", "./m"], "unknown command `chta`"),
        (["chat", "./m", "--meta-instruction", "x"], "with --chat-template"),
        (["chat", "./m", "--adapters", "a=b", "c=d"], "adapters are not supported"),
        (["chat", "./m", "--session-length", "5"], "did you mean --session-len?"),
        (["chat", "./m", "--qqqq"], "`lmdeploy chat --help` lists the options"),
        (["chat", "./m", "second"], "unexpected argument 'second'"),
        (["chat", "--session-len", "many"], "invalid int value: 'many'"),
        (["serve"], "COMMAND"),
        ([], "COMMAND"),
    ],
)
def test_what_does_not_exist_is_answered_with_what_does(
    capsys: pytest.CaptureFixture[str], argv: list[str], words: str
) -> None:
    code, err = outcome(capsys, *argv)
    assert code == 2
    assert words in err
    assert err.startswith("lmdeploy: error: ")
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("error", "code", "text"),
    [
        (ConfigError("bad flag"), 2, "lmdeploy: error: bad flag\n"),
        (CapacityError("too big"), 2, "lmdeploy: error: too big\n"),
        (ModelError("two\nlines"), 1, "lmdeploy: error: two lines\n"),
        (EngineError("broken"), 1, "lmdeploy: error: broken\n"),
        (
            PermissionError(13, "Permission denied", "/x"),
            1,
            "lmdeploy: error: '/x': Permission denied\n",
        ),
        (KeyboardInterrupt(), 130, ""),
    ],
)
def test_errors_are_one_line_and_an_exit_code(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    error: BaseException,
    code: int,
    text: str,
) -> None:
    def fail(args: argparse.Namespace) -> int:
        raise error

    monkeypatch.setattr(check_env, "run", fail)
    assert outcome(capsys, "check_env") == (code, text)


def test_a_fault_of_ours_is_not_dressed_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check_env, "run", lambda args: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        main(["check-env"])


def test_a_closed_pipe_is_quiet() -> None:
    # The reader is gone before anything is written.
    code = "import sys; sys.stdin.read(); from lmdeploy.cli.main import main; sys.exit(main(['check_env']))"
    read, write = os.pipe()
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=write, stderr=subprocess.PIPE, cwd=ROOT
    )
    os.close(write)
    os.close(read)
    _, err = process.communicate(b"", timeout=60)
    assert (process.returncode, err) == (141, b"")


@pytest.mark.parametrize("argv", ["--version", "--help", "chat --help", "check_env"])
@pytest.mark.parametrize(("where", "words"), [(">/dev/full", "No space left"), (">&-", "output is closed")])
def test_output_that_cannot_be_written_is_one_line(argv: str, where: str, words: str) -> None:
    done = shell(f"{sys.executable} -m lmdeploy {argv} {where}")
    assert done.returncode == 1
    assert done.stderr.startswith("lmdeploy: error: ")
    assert words in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_closed_streams(closed: str) -> None:
    done = shell(f"{sys.executable} -m lmdeploy chat no-such-model {closed}")
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr.count("\n") == ("2>" not in closed)


def shell(command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["/bin/sh", "-c", command], capture_output=True, text=True, timeout=60, check=False, cwd=ROOT
    )


def test_command_without_a_traceback_in_a_process() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "lmdeploy", "chat", "no-such-model"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 1
    assert done.stderr.startswith("lmdeploy: error: no-such-model")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("argv", [["--help"], ["chat", "--help"], ["serve", "api_server", "--help"]])
def test_help_names_the_flags(capsys: pytest.CaptureFixture[str], argv: list[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        build_parser().parse_args(argv)
    assert caught.value.code == 0
    text = capsys.readouterr().out
    assert ("--session-len" in text) == (len(argv) > 1)


def test_dash_and_underscore_are_one() -> None:
    argv = ["--session_len", "5", "--top_p=0.5", "some_value", "--", "--kept_as_is"]
    assert normalise(argv) == ["--session-len", "5", "--top-p=0.5", "some_value", "--", "--kept_as_is"]


def parse(cls: type[Any], *argv: str) -> Any:
    parser = argparse.ArgumentParser(exit_on_error=False)
    add_flags(parser, cls)
    return from_args(cls, parser.parse_args(normalise(list(argv))))


@pytest.mark.parametrize("cls", [TurbomindEngineConfig, GenerationConfig])
def test_no_flags_give_the_defaults(cls: Callable[[], Any]) -> None:
    assert parse(cls) == cls()  # type: ignore[arg-type]


def test_flags_reach_their_fields() -> None:
    argv = "--session-len 8192 --max_batch_size 64 --cache-max-entry-count 0.5 --no-enable-prefix-caching"
    argv += " --cache-block-seq-len 32 --num-threads 3 --model-format gguf --revision main"
    assert parse(TurbomindEngineConfig, *argv.split()) == TurbomindEngineConfig(
        session_len=8192,
        max_batch_size=64,
        cache_max_entry_count=0.5,
        enable_prefix_caching=False,
        cache_block_seq_len=32,
        num_threads=3,
        model_format="gguf",
        revision="main",
    )
    for value, bits in (("0", 0), ("none", None), ("8", 8), ("4", 4)):
        assert parse(TurbomindEngineConfig, "--quant_policy", value).quant_policy == bits
    words = ["--stop-words", "a b", "c", "--temperature", "0", "--random-seed", "-5"]
    expected = GenerationConfig(stop_words=["a b", "c"], temperature=0.0, random_seed=-5)
    assert parse(GenerationConfig, *words) == expected
    form = {"type": "regex_schema", "regex_schema": "[a-z]+"}
    assert parse(GenerationConfig, "--response-format", json.dumps(form)).response_format == form
    with pytest.raises(argparse.ArgumentError, match="must be a JSON object"):
        parse(GenerationConfig, "--response-format", "[]")


@pytest.mark.parametrize(
    "argv",
    ["--tp 1", "--quant-policy 0", "--async 0", "--communicator nccl", "--nnodes 1"],
)
def test_flags_of_other_machines_are_accepted_where_they_change_nothing(argv: str) -> None:
    config = parse(TurbomindEngineConfig, *argv.split())
    working = [f.name for f in dataclasses.fields(config) if not is_fixed(f)]
    default = TurbomindEngineConfig()
    assert [getattr(config, name) for name in working] == [getattr(default, name) for name in working]


@pytest.mark.parametrize("argv", ["--tp 2", "--use-logn-attn", "--rope-scaling-factor 2.0"])
def test_flags_of_other_machines_are_refused_with_the_fields_reason(argv: str) -> None:
    with pytest.raises(ConfigError, match="not supported") as caught:
        parse(TurbomindEngineConfig, *argv.split())
    assert caught.value.param is not None
    assert caught.value.param.replace("_", "-") in argv


def test_fields_without_effect_are_not_in_the_help() -> None:
    parser = argparse.ArgumentParser()
    add_flags(parser, TurbomindEngineConfig)
    shown = {a.dest for a in parser._actions if a.help != argparse.SUPPRESS} - {"help"}
    assert shown == {f.name for f in dataclasses.fields(TurbomindEngineConfig) if not is_fixed(f)}


def test_interrupt_while_modules_are_loaded_is_no_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(name: str, *_: object, **__: object) -> None:
        if name == "lmdeploy.cli.main":
            raise KeyboardInterrupt
        raise AssertionError(name)

    entry = importlib.import_module("lmdeploy.__main__")
    monkeypatch.setattr("builtins.__import__", interrupted)
    code = entry.main()
    monkeypatch.undo()
    assert code == 130
