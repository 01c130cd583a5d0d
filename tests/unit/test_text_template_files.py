"""Which file of a model its chat template is read from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from text_models import write_demo_directory

from lmdeploy.errors import ModelError, RequestError
from lmdeploy.text.chat_template import ChatTemplate, load_chat_template
from lmdeploy.text.tokenizer import load_tokenizer

USER = {"role": "user", "content": "What is 2+2?\nThink."}


def configured(path: Path, **files: Any) -> ChatTemplate:
    """The demo directory with other template files in it."""
    write_demo_directory(path)
    config = json.loads((path / "tokenizer_config.json").read_text())
    config["chat_template"] = files.pop("tokenizer_config", None)
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    for name, value in files.items():
        file = path / name.replace("__", "/").replace("_jinja", ".jinja").replace("_json", ".json")
        file.parent.mkdir(exist_ok=True)
        file.write_text(value if isinstance(value, str) else json.dumps(value))
    return load_chat_template(path, load_tokenizer(path))


def test_sources_come_in_order(tmp_path: Path) -> None:
    named = [{"name": "default", "template": "list"}, {"name": "tool_use", "template": "with tools"}]
    template = configured(
        tmp_path / "a", tokenizer_config=named, chat_template_json={"chat_template": "json"}
    )
    assert template.render([]) == "list"
    assert template.render([], tools=[{"type": "function"}]) == "with tools"
    template = configured(tmp_path / "b", chat_template_json={"chat_template": "json"})
    assert template.render([]) == "json"
    template = configured(
        tmp_path / "c",
        chat_template_jinja="jinja",
        additional_chat_templates__tool_use_jinja="more tools",
        tokenizer_config="config",
    )
    assert template.render([]) == "jinja"
    assert template.render([], tools=[{"type": "function"}]) == "more tools"


def test_a_model_without_a_template_refuses_messages(tmp_path: Path) -> None:
    template = configured(tmp_path)
    assert not template.exists
    with pytest.raises(RequestError, match="has no chat template") as caught:
        template.encode([USER])
    assert caught.value.param == "messages"


def test_a_broken_template_names_its_file(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=f"{tmp_path}: the chat template is not valid Jinja: line 1"):
        configured(tmp_path, tokenizer_config="{% if %}")
