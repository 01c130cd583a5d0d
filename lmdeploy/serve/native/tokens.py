"""POST /tokenize, /detokenize, /v1/encode and GET /tokenizer_info: text to ids and back, without an answer.

Nothing here reaches an engine, so lengths are not bound to the context.
"""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from lmdeploy.runtime.chat_input import normalise_messages
from lmdeploy.runtime.sampling import check_ids
from lmdeploy.serve.native.protocol import DetokenizeBody, EncodeBody, TokenizeBody
from lmdeploy.serve.openai.prompts import chat_prompt, check_length
from lmdeploy.serve.openai.protocol import ChatBody, parse_body
from lmdeploy.serve.served import Served, Server
from lmdeploy.serve.transport import from_body, json_response


async def tokenize(server: Server, request: Request) -> Response:
    return await from_body(request, server, _tokenize)


async def detokenize(server: Server, request: Request) -> Response:
    return await from_body(request, server, _detokenize)


async def encode(server: Server, request: Request) -> Response:
    return await from_body(request, server, _encode)


def tokenizer_info(server: Server, model: str | None) -> Response:
    """What a client needs to count tokens as this server does. Raises ModelNotServedError."""
    served, _ = server.model(model)
    tokenizer = served.frontend.tokenizer
    names = ("bos_token", "eos_token", "pad_token", "unk_token")
    return json_response(
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            **{name: tokenizer.named_tokens.get(name) for name in names},
            "bos_token_id": tokenizer.bos_id,
            "eos_token_ids": sorted(tokenizer.eos_ids),
            "vocab_size": tokenizer.vocab_size,
            "model_max_length": served.frontend.session_len,
            "chat_template": served.frontend.chat_template.text,
        }
    )


def _tokenize(server: Server, raw: bytearray) -> Response:
    body = parse_body(TokenizeBody, raw)
    served, _ = server.model(body.model)
    ids = _prompt_ids(served, body) if body.prompt is not None else _message_ids(served, body)
    answer: dict[str, Any] = {
        "count": len(ids),
        "max_model_len": served.frontend.session_len,
        "tokens": ids,
    }
    if body.return_token_strs:
        answer["token_strs"] = [served.frontend.tokenizer.token_text(i) for i in ids]
    return json_response(answer)


def _prompt_ids(served: Served, body: TokenizeBody) -> list[int]:
    assert body.prompt is not None
    return _text_ids(served, body.prompt, body.add_special_tokens is not False, "prompt")


def _message_ids(served: Served, body: TokenizeBody) -> list[int]:
    """Exactly what /v1/chat/completions would make of these fields."""
    names = ("messages", "tools", "chat_template_kwargs", "add_generation_prompt", "continue_final_message")
    fields = {name: value for name in names if (value := getattr(body, name)) is not None}
    chat = parse_body(ChatBody, {**fields, "add_special_tokens": body.add_special_tokens})
    return chat_prompt(served, chat, normalise_messages(chat.messages))


def _text_ids(served: Served, text: str, special: bool, param: str) -> list[int]:
    check_length(served, text, param)
    return served.frontend.tokenizer.encode(text, add_special_tokens=special, parse_special=True)


def _detokenize(server: Server, raw: bytearray) -> Response:
    body = parse_body(DetokenizeBody, raw)
    served, _ = server.model(body.model)
    tokenizer = served.frontend.tokenizer
    if body.tokens:
        check_ids((min(body.tokens), max(body.tokens)), tokenizer.vocab_size, "tokens")
    return json_response({"prompt": tokenizer.decode(body.tokens, skip_special_tokens=False)})


def _encode(server: Server, raw: bytearray) -> Response:
    body = parse_body(EncodeBody, raw)
    served, _ = server.model(body.model)
    if isinstance(body.input, str):
        ids = _encoded(served, body, body.input, "input")
        return json_response({"input_ids": ids, "length": len(ids)})
    lists = [_encoded(served, body, text, f"input[{i}]") for i, text in enumerate(body.input)]
    return json_response({"input_ids": lists, "length": [len(ids) for ids in lists]})


def _encoded(served: Served, body: EncodeBody, text: str, param: str) -> list[int]:
    if not body.do_preprocess:
        return _text_ids(served, text, body.add_bos is not False, param)
    chat = parse_body(ChatBody, {"messages": [{"role": "user", "content": text}]})
    return chat_prompt(served, chat, normalise_messages(chat.messages))
