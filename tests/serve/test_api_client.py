"""LMDeploy's own client against a real server process."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import serve_process

from lmdeploy.serve import APIClient, get_model_list
from lmdeploy.serve.client import ApiError

HI = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def client() -> Iterator[APIClient]:
    with serve_process.running(script="Hello, world.$", options={"api_keys": ["key"]}) as server:
        yield APIClient(server.url, api_key="key")


def test_models(client: APIClient) -> None:
    assert client.available_models == ["byte-model"]
    assert get_model_list(f"{client.api_server_url}/v1/models", "key") == ["byte-model"]


def test_the_old_path_is_the_same_class() -> None:
    from lmdeploy.serve.openai import api_client

    assert api_client.APIClient is APIClient


def test_encode(client: APIClient) -> None:
    assert client.encode("ab") == ([97, 98], 2)
    assert client.encode(["a", "bc"]) == ([[97], [98, 99]], [1, 2])


def test_chat(client: APIClient) -> None:
    (whole,) = client.chat_completions_v1("byte-model", HI)
    assert whole["choices"][0]["message"]["content"] == "Hello, world."
    chunks = list(client.chat_completions_v1("byte-model", HI, stream=True))
    text = "".join(c["choices"][0]["delta"].get("content") or "" for c in chunks)
    assert text == "Hello, world."


def test_completions(client: APIClient) -> None:
    (whole,) = client.completions_v1("byte-model", "hi", max_tokens=5)
    assert whole["choices"][0]["text"] == "Hello"
    chunks = client.completions_v1("byte-model", ["hi"], stream=True)
    assert "".join(c["choices"][0]["text"] for c in chunks) == "Hello, world."


def test_failures_are_exceptions(client: APIClient) -> None:
    with pytest.raises(ApiError, match="temperature") as refused:
        list(client.chat_completions_v1("byte-model", HI, temperature=3))
    assert (refused.value.status, refused.value.param) == (400, "temperature")
    with pytest.raises(ApiError, match="does not exist"):
        list(client.completions_v1("other", "hi"))
    with pytest.raises(ApiError, match="key") as locked:
        APIClient(client.api_server_url, "wrong").encode("a")
    assert locked.value.status == 401
    with pytest.raises(ApiError, match="cannot be reached"):
        list(APIClient("http://127.0.0.1:9").chat_completions_v1("m", HI))
