"""Routes, methods, content types, keys, limits and states of the server, not what a body says."""

from __future__ import annotations

import json
from typing import Any

import pytest
from serve_fakes import Api
from serve_wire import error_of

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def test_routes_and_methods(server: Api) -> None:
    error_of(await server.http.get("/v1/nothing"), 404)
    error_of(await server.http.get("/v1/chat/completions"), 405)
    error_of(await server.http.post("/v1/models"), 405)
    error_of(await server.http.get("/v1/models/org/name"), 404)
    assert (await server.http.get("/v1/models/")).status_code == 200
    assert (await server.http.head("/v1/models")).status_code == 200
    assert (await server.http.head("/health")).status_code == 200
    for path in ("/ping", "/v1/health", "/version"):
        assert (await server.http.get(path)).status_code == 200


async def test_content_types(server: Api) -> None:
    body = json.dumps({"messages": [{"role": "user", "content": "hi"}]})
    for kind in ("application/json", "application/json; charset=utf-8", "Application/JSON;charset=UTF8"):
        response = await server.http.post(
            "/v1/chat/completions", content=body, headers={"content-type": kind}
        )
        assert response.status_code == 200
    without = server.http.build_request("POST", "/v1/chat/completions", content=body)
    assert "content-type" not in without.headers
    assert (await server.http.send(without)).status_code == 200
    for kind in ("text/plain", "application/x-www-form-urlencoded"):
        response = await server.http.post(
            "/v1/chat/completions", content=body, headers={"content-type": kind}
        )
        assert "application/json" in error_of(response, 415)["message"]


async def test_body_limit(server: Api) -> None:
    small = server.configure(max_body=1000)
    assert (await small.chat("x" * 100)).status_code == 200
    error_of(await small.chat("x" * 1000), 413)

    async def pieces() -> Any:
        for _ in range(20):
            yield b" " * 100

    error_of(await small.http.post("/v1/completions", content=pieces()), 413)


async def test_keys(server: Api) -> None:
    locked = server.configure(api_keys=("first", "second"))
    for headers in (
        {"authorization": "Bearer first"},
        {"authorization": "bearer second"},
        {"x-api-key": "second"},
    ):
        assert (await locked.http.get("/v1/models", headers=headers)).status_code == 200
    for headers in ({}, {"authorization": "Bearer "}, {"authorization": "Bearer firs"}, {"x-api-key": "é"}):
        encoded = {k: v.encode() for k, v in headers.items()}
        response = await locked.http.get("/v1/models", headers=encoded)
        assert error_of(response, 401)["code"] == "invalid_api_key"
    for path in ("/health", "/ping", "/v1/health"):
        assert (await locked.http.get(path)).status_code == 200


async def test_cors_and_keys(server: Api) -> None:
    """The preflight needs no key, and refusals carry the headers too."""
    locked = server.configure(api_keys=("key",))
    ask = {"Origin": "http://page", "Access-Control-Request-Method": "POST"}
    preflight = await locked.http.options(
        "/v1/chat/completions",
        headers={**ask, "Access-Control-Request-Headers": "authorization,content-type"},
    )
    assert preflight.status_code == 200
    assert preflight.headers["access-control-allow-origin"] == "*"
    assert "POST" in preflight.headers["access-control-allow-methods"]
    refused = await locked.http.post("/v1/chat/completions", json={}, headers={"Origin": "http://page"})
    error_of(refused, 401)
    assert refused.headers["access-control-allow-origin"] == "*"
    wrong = await server.http.post("/v1/chat/completions", json={}, headers={"Origin": "http://page"})
    assert wrong.headers["access-control-allow-origin"] == "*"
    listed = server.configure(allow_origins=("http://good",), allow_credentials=True)
    for origin, allowed in (("http://good", "http://good"), ("http://evil", None)):
        response = await listed.http.get("/v1/models", headers={"Origin": origin})
        assert response.headers.get("access-control-allow-origin") == allowed


async def test_request_ids(server: Api) -> None:
    async def answered(sent: str | None) -> str:
        headers = {} if sent is None else {"x-request-id": sent}
        return (await server.http.get("/v1/models", headers=headers)).headers["x-request-id"]

    assert await answered("my-id") == "my-id"
    assert await answered("x" * 128) == "x" * 128
    for ignored in ("x" * 129, "", None):
        assert await answered(ignored) not in ("", ignored)
    first, second = await server.chat(), await server.chat()
    assert first.json()["id"] != second.json()["id"]


async def test_full_server(server: Api) -> None:
    full = server.configure(max_requests=1)
    full.server.active = 1
    response = await full.chat()
    assert error_of(response, 429, "rate_limit_error")["code"] == "rate_limit_exceeded"
    assert response.headers["retry-after"]


async def test_draining_server(server: Api) -> None:
    draining = server.configure()
    draining.server.draining = True
    response = await draining.chat()
    assert error_of(response, 503, "server_error")["code"] == "service_unavailable"
    assert (await draining.http.get("/health")).status_code == 503


async def test_a_bug_is_a_500_without_details(server: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> None:
        raise ZeroDivisionError("secret")

    monkeypatch.setattr(server.served.frontend, "request", broken)
    response = await server.chat()
    error = error_of(response, 500, "server_error")
    assert error["code"] == "internal_error"
    assert "secret" not in error["message"]
    assert response.headers["x-request-id"]


async def test_schema_document(server: Api) -> None:
    document = (await server.http.get("/openapi.json")).json()
    for path in ("/v1/chat/completions", "/v1/completions"):
        schema = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
        temperature = schema["properties"]["temperature"]["anyOf"][0]
        assert (temperature["minimum"], temperature["maximum"]) == (0, 2)
        assert "$ref" not in json.dumps(schema)
    assert (
        "messages"
        in document["paths"]["/v1/chat/completions"]["post"]["requestBody"]["content"]["application/json"][
            "schema"
        ]["required"]
    )
    assert (await server.configure(docs=False).http.get("/openapi.json")).status_code == 404


async def test_unknown_route_says_where_to_look(server: Api) -> None:
    response = await server.http.get("/")
    assert response.status_code == 404
    assert "/v1/models" in response.json()["error"]["message"]
