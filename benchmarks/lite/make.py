"""Makes the model of one side: by our command, by a rival in its environment, by llama.cpp's tools.

Knows commands and files; judges nothing. What a command says goes to a log; a failure is its last line.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from measure.demo import demo_model

from lite.gguf_file import write_gguf
from lite.sides import Side
from lite.spawn import spawn
from lite.texts import calibration
from lmdeploy.text.tokenizer import Tokenizer, load_tokenizer

WORKERS = Path(__file__).resolve().parent / "rivals"


class MakeError(Exception):
    """A side has no model; the message is for the result table."""


@dataclass(frozen=True, slots=True)
class Made:
    """seconds and cpu_seconds: of the command that made it; peak_mb: most memory it held."""

    path: Path
    seconds: float = 0.0
    cpu_seconds: float = 0.0
    peak_mb: float = 0.0
    version: str = ""

    def facts(self) -> dict[str, Any]:
        return {name: value for name, value in asdict(self).items() if name != "path"}


@dataclass(frozen=True, slots=True)
class Workshop:
    """models: the originals by name. rivals: what rivals.toml says of each package."""

    out: Path
    models: dict[str, Path]
    rivals: dict[str, dict[str, str]]
    samples: int
    length: int
    timeout: float

    def make(self, side: Side, model: str) -> Made:
        """MakeError when it cannot be made here."""
        if side.maker == "original":
            return Made(self.models[model])
        target = self.out / "made" / f"{model}-{side.case}-{side.name}".replace(" ", "_")
        if target.is_dir():
            shutil.rmtree(target)
        target.parent.mkdir(parents=True, exist_ok=True)
        makers = {"ours": self._ours, "rival": self._rival, "llama.cpp": self._llama_cpp}
        return makers[side.maker](side, model, target)

    def _ours(self, side: Side, model: str, target: Path) -> Made:
        command, *flags = side.options
        data: list[object] = []
        if "--calib-samples" not in flags:
            samples, length = side.samples or self.samples, side.length or self.length
            data = ["--calib-samples", samples, "--calib-seqlen", length]
            if side.text != "general":
                data += ["--calib-dataset", self._text(side.text, samples, length)]
        lmdeploy = [
            sys.executable,
            "-m",
            "lmdeploy",
            "lite",
            command,
            self.models[model],
            "--work-dir",
            target,
        ]
        return self._run([*lmdeploy, "--no-report", *flags, *data], target)

    def _text(self, kind: str, samples: int, length: int) -> Path:
        """One record for each window."""
        file = self.out / f"{kind}-{samples}x{length}.jsonl"
        tokenizer = self._tokenizer()
        texts = [tokenizer.decode(ids.tolist()) for ids in calibration(tokenizer, samples, length, kind)]
        file.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
        return file

    def _tokenizer(self) -> Tokenizer:
        return load_tokenizer(next(iter(self.models.values())))

    def _rival(self, side: Side, model: str, target: Path) -> Made:
        python = self._place(side.package, "python")
        samples = self.out / f"matching-{self.samples}x{self.length}.json"
        windows = calibration(self._tokenizer(), self.samples, self.length)
        samples.write_text(json.dumps([ids.tolist() for ids in windows]))
        job = {**side.job, "model": str(self.models[model]), "out": str(target), "samples": str(samples)}
        file = target.with_name(target.name + ".job.json")
        file.write_text(json.dumps(job))
        made = self._run([python, WORKERS / f"{side.package}_worker.py", file], target)
        for name in ("tokenizer.json", "config.json"):
            if not (target / name).exists():
                shutil.copy(self.models[model] / name, target / name)
        return made

    def _llama_cpp(self, side: Side, model: str, target: Path) -> Made:
        """With the embedding left in float16, as the other sides leave it."""
        tools = Path(self._place("llama.cpp", "bin"))
        kind, *more = side.options
        wide = self.out / f"{model}-f16.gguf"
        if not wide.exists():
            write_gguf(self.models[model], demo_model(), wide)
        target.mkdir()
        flags = ["--imatrix", self._matrix(tools, model, wide)] if "imatrix" in more else []
        flags += ["--token-embedding-type", "f16"]
        return self._run([tools / "llama-quantize", *flags, wide, target / "model.gguf", kind, 1], target)

    def _matrix(self, tools: Path, model: str, wide: Path) -> Path:
        matrix = self.out / f"{model}.imatrix.gguf"
        if not matrix.exists():
            tokenizer, text = self._tokenizer(), self.out / "matching.txt"
            windows = calibration(tokenizer, self.samples, self.length)
            text.write_text("".join(tokenizer.decode(ids.tolist()) for ids in windows))
            where = [
                "-m",
                wide,
                "-f",
                text,
                "-o",
                matrix,
                "-c",
                self.length,
                "--chunks",
                self.samples,
                "-t",
                1,
            ]
            self._run([tools / "llama-imatrix", *where], matrix)
        return matrix

    def _place(self, package: str, key: str) -> str:
        found = self.rivals.get(package, {"error": "not installed (benchmarks/lite/setup.py does it)"})
        if key not in found:
            raise MakeError(f"skipped: {package}: {found.get('error', 'not installed')}")
        return found[key]

    def _run(self, command: Sequence[object], target: Path) -> Made:
        log = self.out / "logs" / f"{target.name}.txt"
        ended = spawn([str(x) for x in command], log, self.timeout)
        if ended.status is None:
            raise MakeError(f"took longer than {self.timeout / 60:.0f} minutes")
        if ended.status:
            raise MakeError(last_line(log.read_text()))
        return Made(target, ended.seconds, ended.cpu_seconds, ended.peak_mb, version_of(ended.output))


def last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:300] if lines else "no message"


def version_of(said: str) -> str:
    """Of a rival's answer; empty for anything else."""
    try:
        answer = json.loads(said.strip().splitlines()[-1])
    except (json.JSONDecodeError, IndexError):
        return ""
    return str(answer.get("version", "")) if isinstance(answer, dict) else ""
