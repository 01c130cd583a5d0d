"""schemathesis reads /openapi.json and sends what it allows and what it forbids to a real server."""

from __future__ import annotations

from collections.abc import Iterator

import hypothesis
import pytest
import schemathesis
import serve_process
from schemathesis import GenerationMode
from schemathesis.checks import load_all_checks
from schemathesis.specs.openapi import checks

load_all_checks()
CHECKS = [
    schemathesis.checks.not_a_server_error,
    checks.status_code_conformance,
    checks.content_type_conformance,
    checks.response_schema_conformance,
]


@pytest.fixture(scope="module")
def server() -> Iterator[serve_process.Server]:
    with serve_process.running(script="Hello, world.$", options={"abort_handling": True}) as server:
        yield server


@pytest.mark.parametrize("mode", list(GenerationMode), ids=lambda mode: mode.value)
def test_the_document_is_true(server: serve_process.Server, mode: GenerationMode) -> None:
    """No 5xx, and every status, content type and body as the document says."""
    schema = schemathesis.openapi.from_url(f"{server.url}/openapi.json")
    sent = set()
    for result in schema.get_all_operations():
        operation = result.ok()
        strategy = operation.as_strategy(generation_mode=mode)

        @hypothesis.settings(
            max_examples=25,
            deadline=None,
            derandomize=True,
            database=None,
            suppress_health_check=list(hypothesis.HealthCheck),
        )
        @hypothesis.given(strategy)
        def send(case: schemathesis.Case) -> None:
            case.call_and_validate(base_url=server.url, timeout=30, checks=CHECKS)
            sent.add(case.path)

        if mode is GenerationMode.POSITIVE or operation.body:
            send()
    assert {"/v1/chat/completions", "/v1/completions", "/generate", "/tokenize"} <= sent
