"""GET /v1/models and /v1/models/{id}."""

from __future__ import annotations

from typing import Any

from starlette.responses import Response

from lmdeploy.serve.openai.served import Served
from lmdeploy.serve.openai.transport import json_response


def list_models(served: Served) -> Response:
    return json_response({"object": "list", "data": [_card(served, name) for name in served.ids]})


def get_model(served: Served, name: str) -> Response:
    """The card of one model; the id may contain slashes. Raises ModelNotServedError."""
    return json_response(_card(served, served.name_for(name)))


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
