"""Makes the model of one side: by our quantiser, by a rival in its environment, by llama.cpp's tools.

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

import numpy as np
import numpy.typing as npt
from measure.demo import demo_model

from lite.gguf_file import write_gguf
from lite.sides import Side
from lite.spawn import spawn
from lite.texts import calibration
from lmdeploy.lite.data.calibration import calibration_windows
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
        worker = WORKERS.parent / "ours_worker.py"
        return self._run([sys.executable, worker, self._job(side, model, target)], target)

    def _rival(self, side: Side, model: str, target: Path) -> Made:
        worker = WORKERS / f"{side.package}_worker.py"
        python = self._place(side.package, "python")
        made = self._run([python, worker, self._job(side, model, target)], target)
        for name in ("tokenizer.json", "config.json"):
            if not (target / name).exists():
                shutil.copy(self.models[model] / name, target / name)
        return made

    def _job(self, side: Side, model: str, target: Path) -> Path:
        windows = self._samples(side)
        samples = target.with_name(target.name + ".samples.json")
        samples.write_text(json.dumps([np.asarray(ids).tolist() for ids in windows]))
        where = {"model": self.models[model], "out": target, "samples": samples}
        file = target.with_name(target.name + ".job.json")
        file.write_text(json.dumps({**side.job, **{name: str(path) for name, path in where.items()}}))
        return file

    def _samples(self, side: Side) -> Sequence[npt.NDArray[np.integer]]:
        """matching: of the held-out text's kind; general: what our command takes by itself; foreign: the
        Chinese part of that."""
        count = self.samples if side.samples is None else side.samples
        length = side.length or self.length
        if side.text == "matching":
            return calibration(self._tokenizer(), count, length) if count else []
        source = None if side.text == "general" else "builtin-chinese"
        return calibration_windows(source, self._tokenizer(), None, count, length).ids

    def _tokenizer(self) -> Tokenizer:
        return load_tokenizer(next(iter(self.models.values())))

    def _llama_cpp(self, side: Side, model: str, target: Path) -> Made:
        """With the embedding left in float16, as the other sides leave it."""
        tools = Path(self._place("llama.cpp", "bin"))
        wide = self.out / f"{model}-f16.gguf"
        if not wide.exists():
            write_gguf(self.models[model], demo_model(), wide)
        target.mkdir()
        flags = ["--imatrix", self._matrix(tools, model, wide)] if side.job.get("imatrix") else []
        flags += ["--token-embedding-type", "f16"]
        return self._run(
            [tools / "llama-quantize", *flags, wide, target / "model.gguf", side.job["kind"], 1], target
        )

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
