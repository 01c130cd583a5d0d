"""Arguments of the benchmarks that time kernels alone."""

from __future__ import annotations

import argparse
import os

from lmdeploy.turbomind import _turbomind
from measure.arguments import positive

K = _turbomind.kernels


def add_kernel_arguments(parser: argparse.ArgumentParser, walked: str) -> None:
    """walked: what `--megabytes` are of."""
    parser.add_argument("--threads", type=positive, default=len(os.sched_getaffinity(0)))
    parser.add_argument(
        "--kernels", default=K.active(), choices=[n for n in K.supported() if n != "portable"]
    )
    parser.add_argument("--megabytes", type=positive, default=256, help=walked)
