"""What an evaluation is to measure. No torch: parsers read it."""

from __future__ import annotations

from dataclasses import dataclass

from lmdeploy.errors import ConfigError


@dataclass(frozen=True, slots=True)
class JudgeOptions:
    """An OpenAI-compatible endpoint that compares answers. url: with or without /v1/chat/completions.

    timeout: seconds that one question may take in all, whatever the server does.
    """

    url: str
    model: str | None = None
    key: str | None = None
    timeout: float = 60.0


@dataclass(frozen=True, slots=True)
class EvalOptions:
    """samples: windows of each domain; seqlen: tokens of a window. texts: files in place of the built-in
    held-out text, each a domain of its own. behaviours: whether questions are asked too. layers: whether
    errors of each layer are computed. eval_file: questions of the user's own (jsonl). seed: of sampled
    answers. command: what was typed, for the report.
    """

    samples: int = 4
    seqlen: int = 512
    texts: tuple[str, ...] = ()
    behaviours: bool = True
    layers: bool = True
    eval_file: str | None = None
    judge: JudgeOptions | None = None
    seed: int = 0
    command: str = ""

    def __post_init__(self) -> None:
        if self.samples < 1:
            raise ConfigError(f"--eval-samples is {self.samples}; at least 1 is needed")
        if self.seqlen < 16:
            raise ConfigError(f"--eval-seqlen is {self.seqlen}; at least 16 is needed")
        if self.judge is not None and not 0 < self.judge.timeout <= 3600:
            raise ConfigError(f"--judge-timeout is {self.judge.timeout:g}; seconds above 0, up to 3600")
        if self.judge is not None and not self.behaviours and self.eval_file is None:
            raise ConfigError("--judge compares answers, and --no-behaviours asks for none; leave one out")
