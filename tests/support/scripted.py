"""A server that plays recorded answers: real HTTP, real engine process, the demo model's real tokenizer.

The model behind it is a script: of the recordings the first whose words all stand in the prompt is played. So
agents and tool loops can be driven through the whole server, although no small model could follow them.
Argument: path of the recordings, a JSON list of {"when": [words...], "say": text}.
"""

from __future__ import annotations

import json
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from demo_model import demo_gguf

from lmdeploy.engine.batch import Batch, StepResult
from lmdeploy.engine.executor import Capabilities
from lmdeploy.engine.guided import Guides
from lmdeploy.engine.loop import Engine, EngineOptions
from lmdeploy.runtime.client import ProcessClient
from lmdeploy.runtime.generate import Frontend, load_frontend
from lmdeploy.runtime.grammars import LLGrammars
from lmdeploy.runtime.messages import Recipe
from lmdeploy.serve import launch
from lmdeploy.serve.parsers.select import choose
from lmdeploy.serve.served import SAMPLING_DEFAULTS, Served, Server, ServerOptions
from lmdeploy.text.tokenizer import Tokenizer, load_tokenizer

MODEL, KEY = "scripted", "sk-scripted"
CONTEXT, BLOCK = 32768, 16
TEMPLATE = Path(__file__).parent / "scripted.jinja"
_SILENT = -12.0  # log-probability of every token but the one that is played


class ScriptedExecutor:
    """Keeps the ids of each cache block, so a sequence is read back through its block table."""

    def __init__(self, tokenizer: Tokenizer, recordings: list[dict[str, Any]], num_blocks: int) -> None:
        self._tokenizer = tokenizer
        self._recordings = recordings
        self._ids = np.zeros((num_blocks, BLOCK), np.int32)
        self._answers: dict[bytes, list[int]] = {}

    def capabilities(self) -> Capabilities:
        return Capabilities(BLOCK, len(self._ids), 2048, 32, self._tokenizer.vocab_size, 20)

    def close(self) -> None:
        self._answers.clear()

    def execute(self, batch: Batch) -> StepResult:
        rows = list(pairwise(batch.row_start.tolist()))
        tables = [batch.block_ids[a:b] for a, b in pairwise(batch.block_start.tolist())]
        for (a, b), table, begin in zip(rows, tables, batch.context_len.tolist(), strict=True):
            places = np.arange(begin, begin + b - a)
            self._ids[table[places // BLOCK], places % BLOCK] = batch.token_ids[a:b]
        if batch.masks is not None:
            batch.masks.wait()
        s = batch.samples
        drawn = []
        for i, index in enumerate(s.token_index.tolist()):
            row = next(r for r, (a, b) in enumerate(rows) if a <= index < b)
            length = int(batch.context_len[row]) + index - rows[row][0] + 1
            sequence = self._ids[tables[row]].reshape(-1)[:length]
            drawn.append(self._drawn(batch, i, sequence))
        return _result(np.array(drawn, np.int32), s.logprobs.tolist())

    def _drawn(self, batch: Batch, sample: int, sequence: Any) -> int:
        """What is played, or the first token that a grammar allows where that is none of it."""
        s = batch.samples
        if s.target_ids[sample] >= 0:
            return int(s.target_ids[sample])
        token = self._next(sequence, int(s.position[sample]))
        allowed = None if batch.masks is None else batch.masks.allowed(sample, self._tokenizer.vocab_size)
        return token if allowed is None or allowed[token] else int(np.flatnonzero(allowed)[0])

    def _next(self, sequence: Any, generated: int) -> int:
        prompt = sequence[: len(sequence) - generated]
        answer = self._answers.get(prompt.tobytes()) or self._chosen(prompt)
        end = next(iter(self._tokenizer.eos_ids))
        return answer[generated] if generated < len(answer) else end

    def _chosen(self, prompt: Any) -> list[int]:
        text = self._tokenizer.decode(prompt.tolist(), skip_special_tokens=False)
        say = next(one["say"] for one in self._recordings if all(word in text for word in one["when"]))
        ids = self._answers[prompt.tobytes()] = self._tokenizer.encode(say)
        return ids


def _result(drawn: Any, wanted: list[int]) -> StepResult:
    count, width = len(drawn), max([0, *wanted])
    top = np.tile(np.arange(width, dtype=np.int32), (count, 1))
    values = np.full((count, width), _SILENT, np.float32)
    if width:
        top[:, 0], values[:, 0] = drawn, -0.5
    chosen = np.full(count, -0.5, np.float32)
    return StepResult(drawn, np.ones(count, np.bool_), chosen, top, values, {})


def build(config: dict[str, Any]) -> Engine:
    """The factory that the engine process runs."""
    tokenizer = load_tokenizer(demo_gguf())
    executor = ScriptedExecutor(tokenizer, config["recordings"], 2 * CONTEXT // BLOCK)
    guides = Guides(LLGrammars(lambda: tokenizer, tokenizer.vocab_size), tokenizer.vocab_size)
    return Engine(executor, EngineOptions(max_batch_size=8, max_prefill_token_num=2048), guides=guides)


def frontend() -> Frontend:
    return load_frontend(
        demo_gguf(),
        session_len=CONTEXT,
        vocab_size=load_tokenizer(demo_gguf()).vocab_size,
        chat_template=TEMPLATE,
        interface_defaults=SAMPLING_DEFAULTS,
        generation_config="lmdeploy",
    )


def main() -> None:
    recordings = json.loads(Path(sys.argv[1]).read_text())
    front = frontend()
    client = ProcessClient(Recipe.of("scripted:build", {"recordings": recordings}))
    parsers = choose("auto", "auto", front.chat_template.texts)
    served = Served(front, client, MODEL, parsers=parsers)
    server = Server((served,), ServerOptions(api_keys=(KEY,)))
    with launch.bind("127.0.0.1", 0) as sock:
        print(sock.getsockname()[1], flush=True)
        listener = launch.Listener("127.0.0.1", sock.getsockname()[1])
        launch.run_server(server, sock, listener, lambda: print("ready", flush=True))


if __name__ == "__main__":
    main()
