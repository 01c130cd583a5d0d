"""What the server process and the engine process say to each other.

Owns the messages and their framing: msgpack bodies after a length of 4 bytes, little endian. Arrays travel as
their bytes. Knows no sockets, no processes and no event loop.
"""

from __future__ import annotations

import importlib
import pickle
import struct
from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np

from lmdeploy.engine.request import Request, TokenEvent

BEAT_SECONDS = 1.0  # between two signs of life of an engine process
_LENGTH = struct.Struct("<I")


class Message(msgspec.Struct, tag=True, array_like=True):
    """Base of all messages; the tag is the class name."""


class Recipe(Message):
    """How to build the engine: import path `module:function` and the pickled argument of that function."""

    factory: str
    config: bytes

    @classmethod
    def of(cls, factory: str, config: object) -> Recipe:
        return cls(factory, pickle.dumps(config))

    def build(self) -> Any:
        """Import the factory and call it. The pickle comes from the parent process over a private socket."""
        module, _, name = self.factory.partition(":")
        return getattr(importlib.import_module(module), name)(pickle.loads(self.config))


class Add(Message):
    """Start a request."""

    request: Request


class Abort(Message):
    """Stop these requests and free what they hold; no event follows for them."""

    request_ids: tuple[str, ...]


class GetStats(Message):
    """Answer with Stats, between two steps."""


class Drain(Message):
    """Take no more requests, finish the running ones, then exit."""


class Close(Message):
    """Exit now."""


class Ready(Message):
    """The engine can take requests. `info` is what it says about itself (numbers and texts)."""

    info: dict[str, Any]


class Failed(Message):
    """The engine could not be built; the process exits after this."""

    kind: str
    message: str


class Beat(Message):
    """The process lives, though it may be deep inside a step, for `step_seconds` now; 0: in none."""

    step_seconds: float = 0.0


class Step(Message):
    """Everything one engine step produced, and what it was: `seconds` long, of `tokens` computed tokens.

    started: requests that began to be computed in it.
    """

    events: list[TokenEvent]
    seconds: float = 0.0
    tokens: int = 0
    started: tuple[str, ...] = ()


class Rejected(Message):
    """The engine did not take this request."""

    request_id: str
    kind: str
    message: str
    param: str | None


class Stats(Message):
    """Answer to GetStats: the fields of StepStats and of the worker's Ledger."""

    values: dict[str, Any]


Command = Recipe | Add | Abort | GetStats | Drain | Close
Report = Ready | Failed | Beat | Step | Rejected | Stats


def _encode_array(value: object) -> object:
    if isinstance(value, np.ndarray):
        return value.shape, np.ascontiguousarray(value).tobytes()
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"{type(value).__name__} cannot be sent to another process")


def _decode_array(kind: Any, value: Any) -> object:
    dtype = kind.__args__[1].__args__[0]
    shape, raw = value
    return np.frombuffer(raw, dtype).reshape(shape)


_encoder = msgspec.msgpack.Encoder(enc_hook=_encode_array)
command_decoder = msgspec.msgpack.Decoder(Command, dec_hook=_decode_array)
report_decoder = msgspec.msgpack.Decoder(Report, dec_hook=_decode_array)


def pack(message: Message) -> bytes:
    """One frame, ready to be written."""
    body = _encoder.encode(message)
    return _LENGTH.pack(len(body)) + body


class Frames:
    """Cuts a byte stream into frame bodies."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[bytes]:
        self._buffer += data
        start = 0
        while len(self._buffer) - start >= _LENGTH.size:
            (size,) = _LENGTH.unpack_from(self._buffer, start)
            end = start + _LENGTH.size + size
            if len(self._buffer) < end:
                break
            yield bytes(self._buffer[start + _LENGTH.size : end])
            start = end
        del self._buffer[:start]
