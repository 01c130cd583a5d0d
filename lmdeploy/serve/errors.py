"""Errors on the wire: the one body, and what becomes of errors that do not come from this project.

Owns the shape `{"error": {message, type, param, code}}`, the status of each error and the wording of
validation errors. Knows no route.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence
from typing import Any

import msgspec
from pydantic import BaseModel, ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from lmdeploy.errors import InvalidValueError, LMDeployError, MissingFieldError, RequestError, shorten
from lmdeploy.serve.limits import KeyLimitError
from lmdeploy.serve.record import RECORD

logger = logging.getLogger("lmdeploy.serve")

_PROBLEMS = {
    "int_from_float": "must be an integer",
    "int_type": "must be an integer",
    "list_type": "must be a list",
    "too_long": "must hold at most {max_length} entries",
    "too_short": "must hold at least {min_length} entries",
    "string_pattern_mismatch": "must be printable ASCII text",
}
_OUT_OF_RANGE = ("greater_than_equal", "less_than_equal", "less_than", "int_parsing_size")
_SHOWN = 200  # characters of a client's value that are repeated in a message


class HttpError(RequestError):
    """A request that is wrong as HTTP: unknown route, wrong method, type or size of the body."""

    def __init__(self, status: int, message: str, code: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.code = code


class RequestAbortedError(RequestError):
    """Somebody asked to end the request."""

    status = 499
    code = "request_aborted"


class RequestTimeoutError(RequestError):
    """An answer takes longer than the server allows. Not a status that clients try again at."""

    code = "request_timeout"


def error_body(error: LMDeployError) -> dict[str, Any]:
    """The body of every error answer, and of the error event of a stream."""
    code = error.code
    if code is None and error.status == 400 and error.param is not None:
        code = InvalidValueError.code  # also where the field was found wrong by what knows no codes
    fields = {"message": error.message, "type": error.type, "param": error.param, "code": code}
    return {"error": fields}


def note(error: LMDeployError) -> None:
    """Into the record of the request that gets this error."""
    if (record := RECORD.get()) is not None:
        record.error = error.code or error.type


def error_response(error: LMDeployError) -> Response:
    headers = {}
    if error.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    if error.status in (429, 503):
        headers["Retry-After"] = str(error.retry_after if isinstance(error, KeyLimitError) else 1)
    note(error)
    body = msgspec.json.encode(error_body(error))
    return Response(body, error.status, headers, media_type="application/json")


def internal_error() -> LMDeployError:
    """What a client is told of a bug; the log has the rest."""
    return LMDeployError("The server failed on this request; its log says why.")


async def on_known_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, LMDeployError)
    if error.status >= 500:
        record = RECORD.get()
        name = record.request_id if record is not None else "-"
        logger.error("%s %s (request %s): %s", request.method, request.url.path, name, error.message)
    return error_response(error)


async def on_http_exception(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    where = f"{request.method} {request.url.path[:_SHOWN]}"
    message = {
        404: f"Unknown route: {where}; the API is below /v1, and GET /v1/models lists what is served.",
        405: f"Method not allowed: {where}.",
    }.get(error.status_code, str(error.detail))
    response = error_response(HttpError(error.status_code, message))
    response.headers.update(error.headers or {})
    return response


async def on_bug(request: Request, error: Exception) -> Response:
    """The exception itself goes on to the web server, which logs it."""
    return error_response(internal_error())


def path_of(loc: Sequence[int | str]) -> str:
    """`("messages", 2, "content")` -> `messages[2].content`."""
    path = ""
    for part in loc:
        path += f"[{part}]" if isinstance(part, int) else f".{part}" if path else part
    return path


@functools.cache
def _ranges(body: type[BaseModel]) -> dict[str, str]:
    """The allowed range of each number field of a body, in words."""
    words = {}
    for name, field in body.model_json_schema()["properties"].items():
        rules = field.get("anyOf", [field])[0]
        low = rules.get("minimum")
        high = rules["exclusiveMaximum"] - 1 if "exclusiveMaximum" in rules else rules.get("maximum")
        if low is not None:
            words[name] = f"must be at least {low}" if high is None else f"must be between {low} and {high}"
    return words


def from_validation(error: ValidationError, body: type[BaseModel]) -> RequestError:
    """The first fault, in words that say field, value and what is allowed."""
    fault = error.errors(include_url=False)[0]
    param = path_of(fault["loc"])
    if fault["type"] == "json_invalid":
        return RequestError(f"The body is not valid JSON: {fault['ctx']['error']}.")
    if fault["type"] == "missing":
        return MissingFieldError(f"Missing required parameter: '{param}'.", param=param)
    if not param:
        return RequestError("The body must be a JSON object.")
    problem = fault["msg"].replace("Input should", "must").replace("valid ", "")
    if fault["type"] in _PROBLEMS:
        problem = _PROBLEMS[fault["type"]].format(**fault.get("ctx", {}))
    if fault["type"] in _OUT_OF_RANGE:
        problem = _ranges(body).get(param, problem)
    got = shorten(fault["input"])
    return InvalidValueError(f"Invalid value for '{param}': {problem}, got {got}.", param=param)
