"""GET /v1/models and /v1/models/{id}."""

from __future__ import annotations

from typing import Any

from starlette.responses import Response

from lmdeploy.serve.served import Served, Server
from lmdeploy.serve.transport import json_response


def list_models(server: Server) -> Response:
    cards = [_card(served, name) for served in server.models for name in served.ids]
    return json_response({"object": "list", "data": cards})


def get_model(server: Server, name: str) -> Response:
    """The card of one model; the id may contain slashes. Raises ModelNotServedError."""
    return json_response(_card(*server.model(name)))


def _card(served: Served, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": served.created,
        "owned_by": "lmdeploy",
        "root": served.model,
        "parent": None,
        "max_model_len": served.frontend.session_len,
    }
