"""Sends broken requests to all routes for minutes, and says what came back.

python benchmarks/fuzz_routes.py [--url http://HOST:PORT] [--seconds 300] [--seed N]

Without --url a server on the fake executor is started. Ends with 1 at an answer that no request may get.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import sys
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests/support"))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", help="a server that runs with --enable-abort-handling")
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    import serve_process
    from route_fuzz import BrokenError, Fuzz

    with contextlib.ExitStack() as stack:
        url = args.url
        if url is None:
            settings = {"script": "Hello, world.$", "options": {"abort_handling": True}}
            url = stack.enter_context(serve_process.running(**settings)).url
        fuzz = Fuzz(url, args.seed)
        try:
            asyncio.run(fuzz.run(args.seconds))
        except BrokenError as error:
            print(error)
            return 1
    statuses: Counter[int] = Counter()
    for (_, status), count in fuzz.counts.items():
        statuses[status] += count
    for status, count in sorted(statuses.items()):
        print(f"{status or 'half sent':>9}: {count}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
