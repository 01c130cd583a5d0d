"""Every exception of the project, as one tree.

LMDeployError                    something this project reports in one line
├── UserError                    the caller can mend it (HTTP 400, exit code 2)
│   ├── ConfigError              a flag, field or environment variable is wrong
│   ├── RequestError             one request is wrong; `param` names the field
│   │   ├── MissingFieldError    a required field is absent
│   │   ├── InvalidValueError    a field has a value that is not allowed
│   │   ├── ContextLengthError   the prompt does not fit the context
│   │   └── ModelNotServedError  the request names a model this server does not serve (404)
│   ├── AuthenticationError      missing or wrong key (401)
│   └── CapacityError            what is asked does not fit this machine
├── ModelError                   a model directory or file is missing, damaged or unsupported (exit code 1)
├── OverloadedError              the queue is full (429)
└── EngineError                  the engine failed on a request (500)
    └── EngineDeadError          the engine process is gone or not ready (503)

A message says what is wrong, why, and what to do about it, in one line. HTTP status, error type and code
are attributes of the class; `serve` turns them into a body in one place. How a value is shown in a message,
and which text is none, is said here too.
"""

from __future__ import annotations

_SHOWN = 200  # characters of a caller's value that are repeated in a message
_SHOWN_DIGITS = 40


class LMDeployError(Exception):
    """Base of all errors this project raises on purpose."""

    status = 500
    type = "server_error"
    code: str | None = "internal_error"
    exit_code = 1

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param


class UserError(LMDeployError):
    """The caller can mend it."""

    status = 400
    type = "invalid_request_error"
    code: str | None = None
    exit_code = 2


class ConfigError(UserError):
    """A flag, a configuration field or an environment variable has a value that cannot work."""


class RequestError(UserError):
    """One request is wrong; `param` is the JSON path of the field."""

    code: str | None = None


class MissingFieldError(RequestError):
    """A required field is absent."""

    code = "missing_required_parameter"


class InvalidValueError(RequestError):
    """A field has a value that is not allowed."""

    code = "invalid_value"


class ContextLengthError(RequestError):
    """The prompt does not fit the context length."""

    code = "context_length_exceeded"


class ModelNotServedError(RequestError):
    """The request names a model that this server does not serve."""

    status = 404
    code = "model_not_found"


class AuthenticationError(UserError):
    """The API key is missing or wrong."""

    status = 401
    code = "invalid_api_key"


class CapacityError(UserError):
    """What is asked does not fit the memory of this machine."""


class ModelError(LMDeployError):
    """A model directory or file is missing, damaged or of an unsupported kind."""


class OverloadedError(LMDeployError):
    """The queue is full; the client should try again later."""

    status = 429
    type = "rate_limit_error"
    code = "rate_limit_exceeded"


class EngineError(LMDeployError):
    """The engine failed on this request (for example non-finite logits)."""


class EngineDeadError(EngineError):
    """The engine process has died or is not ready yet."""

    status = 503
    code = "service_unavailable"


def error_kind(error: LMDeployError) -> str:
    """The name of its class: how an error is told where an object cannot go."""
    return type(error).__name__


def rebuild_error(kind: str, message: str, param: str | None = None) -> LMDeployError:
    """The error of that class; an unknown name gives an EngineError."""
    cls = globals().get(kind, EngineError)
    error: LMDeployError = cls(message, param=param)
    return error


def shorten(value: object) -> str:
    """A caller's value for a message, in at most about 200 characters, in the words of JSON."""
    if isinstance(value, str):
        return repr(value) if len(value) <= _SHOWN else repr(value[:_SHOWN]) + "..."
    if isinstance(value, dict | list):
        return f"{'an object' if isinstance(value, dict) else 'a list'} with {len(value)} entries"
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    try:
        text = repr(value)
    except ValueError:  # Python does not write out whole numbers of thousands of digits
        text = "a number of thousands of digits"
    shown = _SHOWN_DIGITS if isinstance(value, int | float) else _SHOWN
    return text if len(text) <= shown else text[:shown] + "..."


def text_problem(text: str) -> str | None:
    """Why `text` cannot be written as UTF-8, or None.

    Python texts may hold lone surrogates: escapes such as "\\ud800", and bytes of the command line or of a
    terminal that were no UTF-8.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        code = ord(text[error.start])
        byte = (
            f" (the byte 0x{code - 0xDC00:02x} of a text that is not UTF-8)"
            if 0xDC80 <= code < 0xDD00
            else ""
        )
        return f"character {error.start + 1} is the lone surrogate U+{code:04X}{byte}, which is no text"
    return None


def check_text(text: str, param: str) -> None:
    """Raise InvalidValueError naming `param` for a text that cannot be written as UTF-8."""
    problem = text_problem(text)
    if problem is not None:
        raise InvalidValueError(f"{param} is not valid text: {problem}.", param=param)
