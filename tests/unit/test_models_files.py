"""Files that are there and cannot be read, or begin with a byte order mark: named in our own words."""

from __future__ import annotations

import codecs
import json
from pathlib import Path
from typing import Any

import pytest
from gguf_files import write_llama
from hf_files import CONFIG, write_hf
from text_models import write_demo_directory

from lmdeploy.cli.main import main
from lmdeploy.errors import ModelError
from lmdeploy.models.files import locate, read_json
from lmdeploy.models.hub import model_name, resolve_model_path
from lmdeploy.models.registry import load_spec, open_checkpoint
from lmdeploy.runtime.sampling import model_defaults
from lmdeploy.text.chat_template import load_chat_template
from lmdeploy.text.tokenizer import load_tokenizer

UNREADABLE = "/proc/self/mem"  # a regular file whose first byte nobody can read


def one_line(caught: Any, *words: str) -> None:
    message = str(caught.value)
    assert all(word in message for word in words), message
    assert "Errno" not in message
    assert "\n" not in message
    assert len(message) < 1000


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "model.safetensors.index.json"])
def test_a_file_that_cannot_be_read_is_not_called_damaged(name: str, tmp_path: Path) -> None:
    path = write_hf(tmp_path / "m", shards=1 if "index" in name else 0)
    (path / name).unlink()
    (path / name).symlink_to(UNREADABLE)
    with pytest.raises(ModelError) as caught:
        open_checkpoint(path)
    one_line(caught, f"{path / name}: cannot be read: Input/output error")


def test_a_model_path_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ModelError) as caught:
        load_spec(UNREADABLE)
    one_line(caught, f"{UNREADABLE}: cannot be read: Input/output error")
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    for path in (loop, loop / "below"):
        with pytest.raises(ModelError) as caught:
            locate(path)
        one_line(caught, f"{path}: cannot be read: Too many levels of symbolic links")


@pytest.mark.parametrize("call", [resolve_model_path, load_spec])
@pytest.mark.parametrize("length", [300, 5000])
def test_what_no_path_can_be_is_not_repeated_in_full(call: Any, length: int) -> None:
    with pytest.raises(ModelError) as caught:
        call("x" * length)
    one_line(caught, "xxx: cannot be read: File name too long")


def test_long_names_that_are_no_hub_ids_are_shortened() -> None:
    with pytest.raises(ModelError) as caught:
        resolve_model_path("x/" * 1500)
    one_line(caught, "no such file or directory, and not a hub id")
    with pytest.raises(ModelError, match="no such file or directory, and not a hub id"):
        resolve_model_path("~nobody-of-this-name/model")


@pytest.mark.parametrize("refused", ["iterdir", "stat"])
def test_directories_without_rights(refused: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Searchable but not readable, and the contrary. (Root has all rights, so the answer is put in.)"""
    write_hf(tmp_path)
    real = getattr(Path, refused)

    def denied(self: Path, *args: Any, **kwargs: Any) -> Any:
        if refused == "iterdir" or self.name == "config.json":
            raise PermissionError(13, "Permission denied", str(self))
        return real(self, *args, **kwargs)

    monkeypatch.setattr(Path, refused, denied)
    with pytest.raises(ModelError) as caught:
        open_checkpoint(tmp_path)
    named = tmp_path if refused == "iterdir" else tmp_path / "config.json"
    one_line(caught, f"{named}: cannot be read: Permission denied")


def test_the_command_line_has_no_error_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    for path in (UNREADABLE, "y" * 5000):
        assert main(["chat", path, "--prompt", "x"]) != 0
        err = capsys.readouterr().err
        assert "cannot be read: " in err
        assert "Errno" not in err
        assert len(err) < 400


MARK = codecs.BOM_UTF8


def marked(path: Path) -> None:
    path.write_bytes(MARK + path.read_bytes())


def test_a_byte_order_mark_is_none_of_the_text(tmp_path: Path) -> None:
    path = write_hf(tmp_path / "m", shards=2)
    plain = load_spec(path)
    marked(path / "config.json")
    marked(path / "model.safetensors.index.json")
    assert open_checkpoint(path).spec == plain
    (path / "generation_config.json").write_bytes(MARK + b'{"temperature": 0.5}')
    assert model_defaults(path)["temperature"] == 0.5
    (path / "other.json").write_bytes(b'{"x": "\xe9"}')
    with pytest.raises(ModelError, match=r"other\.json: not UTF-8 text: byte 0xe9 at 7\."):
        read_json(path / "other.json")


def test_a_byte_order_mark_before_tokenizer_and_template(tmp_path: Path) -> None:
    write_demo_directory(tmp_path)
    plain = load_tokenizer(tmp_path)
    (tmp_path / "chat_template.jinja").write_bytes(MARK + b"{{ messages[0].content }}")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        marked(tmp_path / name)
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.encode("some text") == plain.encode("some text")
    template = load_chat_template(tmp_path, tokenizer)
    assert template.render([{"role": "user", "content": "hi"}]) == "hi"


def test_a_name_for_every_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "model" / "inner").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "model")
    for typed, name in ((".", "model"), ("./", "model"), ("inner/..", "model"), ("inner", "inner")):
        assert model_name(typed) == name
    for typed, name in (("..", tmp_path.name), ("owner/name", "name"), ("/", "/"), ("x.gguf", "x.gguf")):
        assert model_name(typed) == name


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"architectures": "LlamaForCausalLM"}, "architectures is 'LlamaForCausalLM'; a list of names"),
        ({"model_type": "qwen2"}, "model_type is 'qwen2', but architectures says 'LlamaForCausalLM'"),
        ({"model_type": "gemma3_text"}, "model_type is 'gemma3', but architectures says"),
        (
            {"architectures": ["LlavaForConditionalGeneration"], "text_config": {"model_type": "llama"}},
            "text_config describes is read as a part of Gemma3ForConditionalGeneration, Mistral3For",
        ),
    ],
)
def test_a_model_that_says_two_things_of_itself(config: Any, words: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**CONFIG, **config}))
    with pytest.raises(ModelError) as caught:
        load_spec(tmp_path)
    one_line(caught, words, "config.json")


def test_a_model_type_of_no_family_says_nothing(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**CONFIG, "model_type": "someones_llama"}))
    assert load_spec(tmp_path).family == "llama"


def test_the_gguf_file_beside_weights_must_be_named(tmp_path: Path) -> None:
    write_llama(write_hf(tmp_path) / "some.gguf")
    with pytest.raises(ModelError, match=r"but the files are 'hf'; give the path of some\.gguf\."):
        open_checkpoint(tmp_path, "gguf")
