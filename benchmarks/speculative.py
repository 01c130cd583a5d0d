"""Decode of one sequence with and without speculation, on text that repeats its context and on other text.

    python benchmarks/speculative.py [MODEL] [--config JSON] [--pairs 15] [--tokens 192] [--cpu-time]

Both engines share one executor in this process and answer the same requests in turns. Decode is the time from
a request's first token to its last; ratio = plain time / speculative time, median over pairs with the 5th and
95th percentile. Answers are compared token by token. --cpu-time counts the CPU time of the process instead,
which the work of others does not change, on one thread, because waiting threads would be counted too.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path

from measure.arguments import described, positive
from measure.demo import demo_model

from lmdeploy.config import GenerationConfig, TurbomindEngineConfig
from lmdeploy.engine.loop import Engine
from lmdeploy.engine.request import Request
from lmdeploy.engine.scheduler import EngineOptions
from lmdeploy.runtime.build import build_engine
from lmdeploy.runtime.generate import Frontend, load_frontend
from lmdeploy.runtime.resolve import resolve
from lmdeploy.speculative import speculative_options

CODE = """
class Account:
    def __init__(self, owner, balance):
        self.owner = owner
        self.balance = balance

    def deposit(self, amount):
        if amount <= 0:
            raise ValueError("the amount must be positive")
        self.balance = self.balance + amount
        return self.balance

    def withdraw(self, amount):
        if amount <= 0:
            raise ValueError("the amount must be positive")
        if amount > self.balance:
            raise ValueError("the balance is too small")
        self.balance = self.balance - amount
        return self.balance
"""
NEWS = """The river rose by two metres in a single night, and the old bridge in the middle of the town
was closed in the morning. Engineers of the county looked at the pillars and found no damage, but they
want to wait until the water has fallen before cars may use it again. The market on the south bank takes
place as planned. The school bus goes around by the motorway bridge, which adds twenty minutes to the
way. The mayor thanked the volunteers who filled four thousand sandbags before midnight."""

# name, prompt, temperature
CASES = (
    ("code edit", f"Rename balance to funds in this code and print the whole code again:\n{CODE}", 0.0),
    ("copy", f"Repeat this text word by word:\n{NEWS}", 0.0),
    ("summary", f"Summarise this report in four sentences, keep its words:\n{NEWS}", 0.0),
    ("story, sampled", "Write a long story about a lighthouse keeper and a stranger.", 1.0),
    ("list, sampled hot", "Name unusual objects one might find in an attic, and a use for each.", 1.5),
)


def decode_seconds(
    engine: Engine, request: Request, clock: Callable[[], float] = time.perf_counter
) -> tuple[float, list[int]]:
    """From the first token to the last, and all tokens."""
    tokens: list[int] = []
    first = last = 0.0
    engine.add(request)
    while engine.has_work:
        for event in engine.step():
            last = clock()
            first = first or last
            tokens += event.token_ids
    return last - first, tokens


def compare(args: argparse.Namespace, frontend: Frontend, plain: Engine, speculative: Engine) -> None:
    clock = time.process_time if args.cpu_time else time.perf_counter
    print(f"{'text':<20} {'ratio':>6}  {'5 % - 95 %':<13} {'accepted':>8} {'of drafted':>10} {'tokens':>6}")
    for name, prompt, temperature in (case for case in CASES if args.only in case[0]):
        ids = frontend.chat_ids([{"role": "user", "content": prompt}])
        ratios, before, count = [], speculative.stats().totals, 0
        for pair in range(args.pairs):
            sampling = {"temperature": temperature, "do_sample": temperature > 0, "random_seed": pair}
            config = GenerationConfig(max_new_tokens=args.tokens, **sampling)
            request = frontend.request(f"{name} {pair}", ids, config)
            sides = [plain, speculative] if pair % 2 else [speculative, plain]
            seconds = {id(side): decode_seconds(side, request, clock) for side in sides}
            assert seconds[id(plain)][1] == seconds[id(speculative)][1], "the answers differ"
            ratios.append(seconds[id(plain)][0] / seconds[id(speculative)][0])
            count += len(seconds[id(plain)][1])
        after = speculative.stats().totals
        drafted = after.drafted_tokens - before.drafted_tokens
        accepted = after.accepted_tokens - before.accepted_tokens
        ratios.sort()
        low, high = ratios[len(ratios) // 20], ratios[-1 - len(ratios) // 20]
        share = accepted / drafted if drafted else 0.0
        print(
            f"{name:<20} {statistics.median(ratios):>6.2f}  {f'{low:.2f} - {high:.2f}':<13} {accepted:>8} "
            f"{share:>10.0%} {count:>6}",
            flush=True,
        )


def main() -> None:
    parser = described(__doc__)
    parser.add_argument("model", nargs="?", type=Path, help="default: the demo model")
    parser.add_argument("--config", default='{"method": "ngram"}', metavar="JSON", help="speculative_config")
    parser.add_argument("--pairs", type=positive, default=15)
    parser.add_argument("--tokens", type=positive, default=192)
    parser.add_argument("--threads", type=positive, default=2)
    parser.add_argument("--cpu-time", action="store_true")
    parser.add_argument("--only", default="", metavar="TEXT", help="cases whose name has this in it")
    args = parser.parse_args()
    engine_config = TurbomindEngineConfig(
        session_len=2048,
        max_batch_size=4,
        num_threads=1 if args.cpu_time else args.threads,
        cache_max_entry_count=0.2,
        enable_prefix_caching=False,
    )
    model = str(args.model or demo_model())
    config = resolve(model, engine_config, speculative=speculative_options(args.config))
    speculative = build_engine(config)
    options = EngineOptions(max_batch_size=4, max_prefill_token_num=512, enable_prefix_caching=False)
    plain = Engine(speculative.executor, options)
    frontend = load_frontend(
        Path(config.model_path), session_len=config.session_len, vocab_size=config.vocab_size
    )
    compare(args, frontend, plain, speculative)


if __name__ == "__main__":
    main()
