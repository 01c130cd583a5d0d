"""`--config`: a file means what the same flags mean."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pytest

from lmdeploy.cli.config_file import settings_of, yaml_text
from lmdeploy.cli.main import build_parser
from lmdeploy.cli.serve import _add_flags_of_a_model
from lmdeploy.cli.several import models_of
from lmdeploy.errors import ConfigError


def parsed(*words: str) -> argparse.Namespace:
    return build_parser().parse_args(["serve", "api_server", *words])


def plain(args: argparse.Namespace) -> dict[str, Any]:
    """Without what tells where a value came from."""
    left_out = ("config", "config_own", "config_given", "config_parser")
    return {name: value for name, value in vars(args).items() if name not in left_out}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "server.yaml"


FLAGS = [
    "some/model",
    "--session-len",
    "512",
    "--model-name",
    "a",
    "--model-name",
    "b",
    "--api-keys",
    "x",
    "y",
]
FLAGS += ["--no-enable-prefix-caching", "--allow-credentials", "--cache-max-entry-count", "0.5"]
FLAGS += ["--speculative-config", '{"method": "ngram"}', "--max-body-size", "64MiB", "--log-level=INFO"]
FILE = """
model: some/model
session_len: 512
model-name: [a, b]
api_keys: [x, y]
enable-prefix-caching: false
allow-credentials: true
cache-max-entry-count: 0.5
speculative-config: {method: ngram}
max-body-size: 64MiB
log-level: INFO
chat-template: null
ssl: false
"""


def test_a_file_is_the_same_as_flags(file: Path) -> None:
    file.write_text(FILE)
    assert plain(parsed("--config", str(file))) == plain(parsed(*FLAGS))


def test_flags_win_wherever_they_stand(file: Path) -> None:
    file.write_text(FILE)
    for words in (
        ["other/model", "--session-len", "64", "--model-name", "c", "--config", str(file)],
        ["--config", str(file), "other/model", "--session-len", "64", "--model-name", "c"],
    ):
        args = parsed(*words)
        assert (args.model_path, args.session_len, args.model_name) == ("other/model", 64, ["c"])
        assert args.cache_max_entry_count == 0.5


def test_what_is_printed_can_be_read_back(file: Path) -> None:
    args = parsed(*[word for word in FLAGS if word not in ("--api-keys", "x", "y")])
    file.write_text(yaml_text(settings_of(args.config_parser, args, "model")))
    assert plain(parsed("--config", str(file))) == plain(args)


def test_keys_are_not_printed() -> None:
    args = parsed("m", "--api-keys", "secret", "@file")
    text = yaml_text(settings_of(args.config_parser, args, "model"))
    assert "secret" not in text
    assert "@file" in text


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("sesion-len: 4", "there is no setting 'sesion-len'; did you mean 'session-len'?"),
        ("zzz: 4", "there is no setting 'zzz'; each key is a flag"),
        ("session-len: four", "argument --session-len: invalid int value: 'four'"),
        ("session-len: [1, 2]", "session-len: must be a text or a number, got a list with 2 entries"),
        ("session-len: true", "session-len: must be a text or a number, got true"),
        ("ssl: 3", "ssl: must be true or false, got 3"),
        ("backend: cuda", "argument --backend: invalid choice: 'cuda'"),
        ("max-body-size: 3 parsecs", "'3 parsecs' is no size"),
        ("session-len: 1\nsession-len: 2", "line 2: 'session-len' comes twice"),
        ("a: [", "line 1"),
        ("- a", "must hold settings"),
        ("config: other.yaml", "there is no setting 'config'"),
    ],
)
def test_faults_are_named_with_the_file(file: Path, text: str, message: str) -> None:
    file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        parsed("--config", str(file))
    assert message in caught.value.message
    assert str(file) in caught.value.message
    assert "\n" not in caught.value.message


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--config .*no.yaml' cannot be read: No such file"):
        parsed("--config", str(tmp_path / "no.yaml"))


# Several models.

MODELS = """
session-len: 2048
max-batch-size: 4
models:
  - model: first.gguf
    name: one
    share: 3
  - model: second.gguf
    name: [two, zwei]
    session_len: 512
    enable-prefix-caching: false
"""


def models(file: Path, text: str, *words: str) -> list[argparse.Namespace]:
    file.write_text(text)
    return models_of(parsed("--config", str(file), *words), _add_flags_of_a_model)


def test_entries_take_what_stands_beside_the_list(file: Path) -> None:
    one, two = models(file, MODELS)
    assert (one.model_path, one.model_name, one.share, one.session_len) == ("first.gguf", ["one"], 3.0, 2048)
    assert (two.model_path, two.model_name, two.share) == ("second.gguf", ["two", "zwei"], 1.0)
    assert (two.session_len, two.enable_prefix_caching, two.max_batch_size) == (512, False, 4)
    assert not hasattr(one, "enable_prefix_caching")
    assert one.by_path and two.by_path


def test_the_command_line_wins_over_entries(file: Path) -> None:
    assert [m.session_len for m in models(file, MODELS, "--session-len", "64")] == [64, 64]


def test_one_model_twice_goes_by_its_names(file: Path) -> None:
    twice = MODELS.replace("second.gguf", "first.gguf")
    assert [m.by_path for m in models(file, twice)] == [False, False]
    with pytest.raises(ConfigError, match=r"give each a `name`"):
        models(file, twice.replace("    name: one\n", ""))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("name: one", "name: two"), "two models have the name 'two'"),
        (("share: 3", "share: 0"), "models[0]: share must be a number above 0, got 0"),
        (("share: 3", "server-port: 3"), "models[0]: there is no setting 'server-port'"),
        (("- model: second.gguf", "- path: second.gguf"), "models[1]: `model` must name"),
        (("session-len: 2048", "model: third.gguf"), "a model or name beside the list"),
    ],
)
def test_faults_of_entries(file: Path, change: tuple[str, str], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        models(file, MODELS.replace(*change, 1))
    assert message in caught.value.message


def test_no_model_at_all() -> None:
    with pytest.raises(ConfigError, match="name a MODEL"):
        models_of(parsed(), _add_flags_of_a_model)
