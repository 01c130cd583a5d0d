"""`APIClient`: LMDeploy's client for scripts, with nothing but the standard library.

New code is better off with the `openai` package; this one is for scripts that exist.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from http.client import HTTPException, HTTPResponse
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

from lmdeploy.errors import LMDeployError

_TIMEOUT = 600.0  # seconds without a byte from the server


class ApiError(LMDeployError):
    """The server refused a request, or could not be reached; `status` is that of its answer, or 0."""

    def __init__(self, message: str, status: int = 0, param: str | None = None) -> None:
        super().__init__(message, param=param)
        self.status = status


def get_model_list(api_url: str, api_key: str | None = None) -> list[str]:
    """Names of the models at `api_url`, the full address of /v1/models. Raises ApiError."""
    with _open(api_url, None, api_key) as response:
        return [card["id"] for card in json.load(response)["data"]]


class APIClient:
    """Talks to one server. Fields left out have this client's own defaults, not the server's."""

    def __init__(self, api_server_url: str, api_key: str | None = None, **_: Any) -> None:
        self.api_server_url = api_server_url.rstrip("/")
        self.api_key = api_key
        self._models: list[str] = []

    @property
    def available_models(self) -> list[str]:
        """Names of the served models, asked once."""
        self._models = self._models or get_model_list(f"{self.api_server_url}/v1/models", self.api_key)
        return self._models

    def encode(self, input: str | list[str], do_preprocess: bool = False, add_bos: bool = True) -> Any:
        """(token ids, their number) of a text; lists of both for a list of texts."""
        body = {"input": input, "do_preprocess": do_preprocess, "add_bos": add_bos}
        (answer,) = self._post("/v1/encode", body)
        return answer["input_ids"], answer["length"]

    def chat_completions_v1(
        self,
        model: str,
        messages: str | list[dict[str, Any]],
        temperature: float | None = 0.7,
        top_p: float | None = 1.0,
        top_k: int | None = 40,
        stream: bool = False,
        **fields: Any,
    ) -> Iterator[dict[str, Any]]:
        """The answer, or its chunks with `stream`. `fields`: any other of the route. Raises ApiError."""
        sampling = {"temperature": temperature, "top_p": top_p, "top_k": top_k}
        body = {"model": model, "messages": messages, **sampling, "stream": stream, **fields}
        return self._post("/v1/chat/completions", body)

    def completions_v1(
        self,
        model: str,
        prompt: str | list[Any],
        temperature: float | None = 0.7,
        top_p: float | None = 1.0,
        top_k: int | None = 40,
        max_tokens: int | None = 16,
        stream: bool = False,
        **fields: Any,
    ) -> Iterator[dict[str, Any]]:
        """The answer, or its chunks with `stream`. `fields`: any other of the route. Raises ApiError."""
        sampling = {"temperature": temperature, "top_p": top_p, "top_k": top_k, "max_tokens": max_tokens}
        body = {"model": model, "prompt": prompt, **sampling, "stream": stream, **fields}
        return self._post("/v1/completions", body)

    def _post(self, path: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        with _open(self.api_server_url + path, body, self.api_key) as response:
            if not body.get("stream"):
                yield json.load(response)
                return
            for line in response:
                yield from _event(line)


def _event(line: bytes) -> Iterator[dict[str, Any]]:
    """What one line of an event stream holds."""
    text = line.strip()
    if not text.startswith(b"data:") or text == b"data: [DONE]":
        return
    event = json.loads(text.removeprefix(b"data:"))
    if "error" in event:
        raise ApiError(event["error"]["message"], 200, event["error"].get("param"))
    yield event


def _open(url: str, body: dict[str, Any] | None, api_key: str | None) -> HTTPResponse:
    headers = {"Content-Type": "application/json"}
    if api_key is not None:
        headers["Authorization"] = f"Bearer {api_key}"
    data = None if body is None else json.dumps(body).encode()
    try:
        response: HTTPResponse = urlopen(Request(url, data, headers), timeout=_TIMEOUT)
        return response
    except HTTPError as error:
        raise _refusal(error) from None
    except (URLError, OSError, HTTPException, ValueError) as error:
        reason = getattr(error, "reason", None) or error
        raise ApiError(f"{url} cannot be reached: {reason}") from None


def _refusal(error: HTTPError) -> ApiError:
    try:
        fields = json.load(error)["error"]
        return ApiError(fields["message"], error.code, fields.get("param"))
    except (ValueError, KeyError, TypeError):
        return ApiError(f"the server answered {error.code} {error.reason}", error.code)
