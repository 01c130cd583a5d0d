"""What a JSON schema costs a token: the same 8 streams with and without one, in turns on one engine.

    python benchmarks/guided.py MODEL [--streams 8] [--tokens 96] [--turns 5]

Answers of both kinds have the same number of tokens: the schema asks for a text longer than that. The figure
is the median over turns of (seconds a token with schema / seconds a token without) - 1.
"""

from __future__ import annotations

import argparse
import statistics
import time

from lmdeploy import GenerationConfig, TurbomindEngineConfig, pipeline

SCHEMA = {
    "type": "object",
    "properties": {
        "title": {"type": "string", "minLength": 8, "maxLength": 60},
        "year": {"type": "integer", "minimum": 1900, "maximum": 2100},
        "lines": {"type": "array", "items": {"type": "string", "minLength": 40}, "minItems": 200},
    },
    "required": ["title", "year", "lines"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "story", "schema": SCHEMA}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--turns", type=int, default=5)
    args = parser.parse_args()
    prompts = [f"Story number {i} about a lighthouse, as JSON:" for i in range(args.streams)]
    free = GenerationConfig(max_new_tokens=args.tokens, ignore_eos=True)
    guided = GenerationConfig(max_new_tokens=args.tokens, ignore_eos=True, response_format=FORMAT)
    with pipeline(args.model, backend_config=TurbomindEngineConfig(session_len=2048)) as pipe:

        def seconds(config: GenerationConfig) -> float:
            """A token of one stream."""
            began = time.perf_counter()
            answers = pipe(prompts, gen_config=config)
            spent = time.perf_counter() - began
            return spent / max(answer.generate_token_len for answer in answers)

        seconds(free), seconds(guided)
        pairs = [(seconds(free), seconds(guided)) for _ in range(args.turns)]
    for without, with_schema in pairs:
        print(f"without {without * 1e3:.2f} ms, with {with_schema * 1e3:.2f} ms a token")
    overhead = statistics.median(b / a - 1 for a, b in pairs)
    print(f"overhead at {args.streams} streams: {overhead:+.1%} a token (median of {args.turns} turns)")


if __name__ == "__main__":
    main()
