"""Every environment variable this project reads, in one table.

Knows names, meanings and accepted values; what follows from a value is decided by whoever asks for it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from lmdeploy.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Variable:
    """One environment variable; an empty value counts as not set."""

    name: str
    help: str
    choices: tuple[str, ...] = ()
    most: int = 2**31 - 1  # of a number

    def text(self, environ: Mapping[str, str] = os.environ) -> str | None:
        """Its value, or None when not set. Raises ConfigError when the value is not one of `choices`."""
        value = environ.get(self.name, "").strip()
        if value and self.choices and value not in self.choices:
            raise ConfigError(f"{self.name}={value}: must be one of {', '.join(self.choices)}")
        return value or None

    def on(self, environ: Mapping[str, str] = os.environ) -> bool:
        """Whether it is set to 1, true, yes or on."""
        return (self.text(environ) or "").lower() in ("1", "true", "yes", "on")

    def number(self, environ: Mapping[str, str] = os.environ) -> int | None:
        """Its value as a whole number from 1 to `most`, or None when not set. Raises ConfigError."""
        value = self.text(environ)
        if value is None:
            return None
        digits = value.isascii() and value.isdecimal() and len(value) <= 20
        if not digits or not 1 <= int(value) <= self.most:
            raise ConfigError(f"{self.name}={value:.40}: must be a whole number from 1 to {self.most}")
        return int(value)


KERNELS = Variable(
    "LMDEPLOY_KERNELS",
    "kernel set of the native engine: portable, avx2, avx512 or neon; default: the best one this CPU runs",
    choices=("portable", "avx2", "avx512", "neon"),
)
NUM_THREADS = Variable(
    "LMDEPLOY_NUM_THREADS",
    "compute threads where num_threads is not given; default: usable physical cores",
    most=1024,
)
HF_HUB_OFFLINE = Variable("HF_HUB_OFFLINE", "1: never download a model; only what is in the cache is used")
HF_HOME = Variable("HF_HOME", "folder of downloaded models; default: ~/.cache/huggingface")
XDG_CACHE_HOME = Variable(
    "XDG_CACHE_HOME", "folder of caches, here of converted tokenizers; default: ~/.cache"
)
HF_TOKEN = Variable("HF_TOKEN", "access token for models on the hub that need one")
USE_MODELSCOPE = Variable("LMDEPLOY_USE_MODELSCOPE", "refused when on: models come from the Hugging Face hub")
CUDA_VISIBLE_DEVICES = Variable(
    "CUDA_VISIBLE_DEVICES", "cards the PyTorch engine may use, by number or id; the first one computes"
)
CUDA_HOME = Variable("CUDA_HOME", "CUDA toolkit; only reported by `lmdeploy check_env`")
OPENAI_API_KEY = Variable("OPENAI_API_KEY", "key for the endpoint of `lmdeploy lite eval --judge`")
SSL_KEYFILE = Variable("SSL_KEYFILE", "private key file for `lmdeploy serve ... --ssl`")
SSL_CERTFILE = Variable("SSL_CERTFILE", "certificate file for `lmdeploy serve ... --ssl`")
NODE_API_KEY = Variable(
    "LMDEPLOY_NODE_API_KEY",
    "key that `lmdeploy serve proxy` shows to its servers, in place of the clients' own keys",
)
PROXY_API_KEY = Variable(
    "LMDEPLOY_PROXY_API_KEY", "key with which `lmdeploy serve api_server` registers at its --proxy-url"
)
HEART_BEAT = Variable(
    "LMDEPLOY_CONTROLLER_HEART_BEAT_EXPIRATION",
    "seconds between two looks of `lmdeploy serve proxy` at its servers, without --health-interval",
    most=3600,
)

VARIABLES = (
    KERNELS,
    NUM_THREADS,
    HF_HUB_OFFLINE,
    HF_HOME,
    HF_TOKEN,
    XDG_CACHE_HOME,
    USE_MODELSCOPE,
    OPENAI_API_KEY,
    SSL_KEYFILE,
    SSL_CERTFILE,
    NODE_API_KEY,
    PROXY_API_KEY,
    HEART_BEAT,
    CUDA_VISIBLE_DEVICES,
    CUDA_HOME,
)
