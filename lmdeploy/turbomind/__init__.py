"""Compute on the CPU with the native engine. Importing this loads no extension; calling a function does."""

from __future__ import annotations


def kernel_sets() -> tuple[str, ...]:
    """Names of the kernel sets this machine can run, slowest first."""
    from lmdeploy.turbomind import _turbomind

    return tuple(_turbomind.kernels.supported())
