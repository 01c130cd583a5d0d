"""The only place that knows which devices there are and how to speak to them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from lmdeploy.errors import ConfigError

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def open_device(name: str, num_threads: int) -> torch.device:
    """The device called "cpu" or "cuda"; ConfigError when torch does not see it.

    num_threads: compute threads on the CPU, set for the whole process: torch knows no other way.
    """
    if name == "cuda" and not torch.cuda.is_available():
        build = "was built without CUDA" if torch.version.cuda is None else "sees no card"
        raise ConfigError(
            f"device_type=cuda: torch {torch.__version__} {build}; install a torch that fits the driver, or"
            " set device_type=cpu",
            param="device_type",
        )
    if name == "cpu" and torch.get_num_threads() != num_threads:
        torch.set_num_threads(num_threads)
    return torch.device(name)


@contextmanager
def out_of_memory_is_memory_error() -> Iterator[None]:
    """torch has another error for a full machine than for a full card; both become MemoryError."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise MemoryError(str(error)) from None
    except RuntimeError as error:
        if "allocate memory" in str(error):
            raise MemoryError(str(error)) from None
        raise
