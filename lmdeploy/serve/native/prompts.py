"""GET /prompts/{id}: what the model saw of a request, token by token, where the server keeps prompts."""

from __future__ import annotations

from typing import Any

from starlette.responses import Response

from lmdeploy.runtime.prompt_view import tokens
from lmdeploy.serve.errors import HttpError
from lmdeploy.serve.kept_prompts import KeptPrompt
from lmdeploy.serve.served import Server
from lmdeploy.serve.transport import json_response


def kept_prompts(server: Server, name: str) -> Response:
    """The prompts of the request `name`, the id of an answer or an x-request-id. Raises HttpError 404."""
    stores = [served.kept for served in server.models if served.kept is not None]
    if not stores:
        raise HttpError(404, "This server keeps no prompts; start it with --keep-prompts N.")
    found = [kept for store in stores for kept in store.find(name)]
    if not found:
        raise HttpError(404, f"No prompt is kept for {name[:200]!r}.")
    return json_response({"object": "list", "data": [_body(kept) for kept in found]})


def _body(kept: KeptPrompt) -> dict[str, Any]:
    ids = kept.ids.tolist()
    return {
        "id": kept.reply_id,
        "request_id": kept.request_id,
        "model": kept.model,
        "count": len(ids),
        "text": kept.tokenizer.decode(ids, skip_special_tokens=False),
        "tokens": [token.fields() for token in tokens(kept.tokenizer, ids)],
    }
