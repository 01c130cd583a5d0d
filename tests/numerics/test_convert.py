"""A converted model is the model: same logits bit for bit, same text side; a damaged folder is refused."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import quantised_hf as q
from demo_model import demo_gguf
from native_case import sequence_logits

from lmdeploy import PytorchEngineConfig, TurbomindEngineConfig
from lmdeploy.cli import smoke
from lmdeploy.cli.main import main
from lmdeploy.engine.executor import Limits
from lmdeploy.errors import CapacityError, ConfigError, ModelError
from lmdeploy.models import packed as form
from lmdeploy.models.registry import load_spec, open_checkpoint
from lmdeploy.runtime import build
from lmdeploy.runtime import convert as conversion
from lmdeploy.runtime.convert import convert
from lmdeploy.runtime.resolve import resolve
from lmdeploy.text.chat_template import load_chat_template
from lmdeploy.text.tokenizer import load_tokenizer
from lmdeploy.turbomind import _turbomind as native
from lmdeploy.turbomind import packed as layouts
from lmdeploy.turbomind.executor import NativeConfig, TurbomindExecutor
from lmdeploy.turbomind.layout import model_layout

IDS = np.arange(1, 40, dtype=np.int32)
LIMITS = Limits(max_rows=4, max_step_tokens=64, max_context=64, block_size=16, num_threads=2)


def logits(path: Path) -> Any:
    checkpoint = open_checkpoint(path)
    executor = TurbomindExecutor(NativeConfig(LIMITS, 16), checkpoint.spec, checkpoint)
    return sequence_logits(executor, IDS)


@pytest.fixture
def smoke_model(tmp_path: Path) -> Path:
    path = tmp_path / "model"
    path.mkdir()
    smoke.write_model(path)
    return path


@pytest.fixture
def folder(smoke_model: Path, tmp_path: Path) -> Path:
    """The smoke model, converted."""
    convert(smoke_model, tmp_path / "packed")
    return tmp_path / "packed"


def act_order(name: str, n: int, k: int, seed: int) -> tuple[q.Parts, q.Array]:
    """All tensors that share an input list it in one order."""
    matrix = q.random_matrix(n, k, 64, seed=seed, least_zero=1)
    g_idx = q.act_order(k, 64, k)
    return q.pack_gptq(g_idx=g_idx)(*matrix), q.weights(*matrix, g_idx)


def awq(name: str, n: int, k: int, seed: int) -> tuple[q.Parts, q.Array]:
    matrix = q.random_matrix(n, k, 64, seed=seed)
    return q.pack_awq(*matrix), q.weights(*matrix)


def gptq_directory(path: Path) -> Path:
    config = {"quant_method": "gptq", "bits": 4, "group_size": 64, "desc_act": True}
    return q.llama(act_order).write(path, config)


def awq_directory(path: Path) -> Path:
    config = {"quant_method": "awq", "bits": 4, "group_size": 64, "zero_point": True, "version": "gemm"}
    return q.llama(awq).write(path, config)


def plain_directory(path: Path) -> Path:
    smoke.write_model(path)
    return path


MODELS: dict[str, Callable[[Path], Path]] = {
    "float32": plain_directory,
    "awq": awq_directory,
    "gptq act-order": gptq_directory,
    "gguf": lambda _: demo_gguf(),
}


@pytest.mark.parametrize("name", MODELS)
def test_logits_are_those_of_the_model(name: str, tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    model = MODELS[name](source)
    convert(model, tmp_path / "packed")
    wanted = logits(model)
    assert np.array_equal(logits(tmp_path / "packed"), wanted)
    shutil.rmtree(source)  # the folder works alone
    assert np.array_equal(logits(tmp_path / "packed"), wanted)


@pytest.mark.parametrize("name", ["float32", "gguf"])
def test_the_text_side_and_the_plan_are_those_of_the_model(name: str, tmp_path: Path) -> None:
    (tmp_path / "source").mkdir()
    model = MODELS[name](tmp_path / "source")
    if model.is_dir():
        (model / "chat_template.jinja").write_text("{{ messages[0]['content'] }}!")
        (model / "generation_config.json").write_text('{"temperature": 0.25, "eos_token_id": [5, 257]}')
    folder = tmp_path / "packed"
    convert(model, folder)
    ours, theirs = load_tokenizer(folder), load_tokenizer(model)
    assert ours.encode("Hello, Ångström") == theirs.encode("Hello, Ångström")
    assert (ours.eos_ids, ours.bos_id) == (theirs.eos_ids, theirs.bos_id)
    messages = [{"role": "user", "content": "Hi"}]
    assert load_chat_template(folder, ours).render(messages) == load_chat_template(model, theirs).render(
        messages
    )
    assert load_spec(folder) == load_spec(model)
    wanted = TurbomindEngineConfig(session_len=64, max_batch_size=1)
    assert resolve(str(folder), wanted).plan.total == resolve(str(model), wanted).plan.total
    if model.is_dir():
        assert (folder / "generation_config.json").read_text() == (
            model / "generation_config.json"
        ).read_text()
    assert not list(folder.glob("*.safetensors*"))


def test_a_folder_is_readable_by_whom_the_umask_lets(folder: Path) -> None:
    mask = os.umask(0)
    os.umask(mask)
    assert folder.stat().st_mode & 0o777 == 0o777 & ~mask


def change(path: Path, at: int, bits: int = 1) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= bits
    path.write_bytes(data)


def refused(folder: Path) -> str:
    """The message with which a model is not loaded."""
    with pytest.raises(ModelError) as caught:
        logits(folder)
    message = caught.value.message
    assert "\n" not in message and "convert" in message
    return message


@pytest.mark.parametrize("at", [0, -1, 12345])
def test_a_changed_byte_of_the_weights_is_found(folder: Path, at: int) -> None:
    change(folder / form.WEIGHTS, at)
    assert "packed.bin: bytes 0 to" in refused(folder) and "damaged" in refused(folder)


def test_swapped_words_of_the_weights_are_found(folder: Path) -> None:
    path = folder / form.WEIGHTS
    data = path.read_bytes()
    assert data[:64] != data[64:128]
    path.write_bytes(data[64:128] + data[:64] + data[128:])
    assert "damaged" in refused(folder)


def test_cut_off_weights_are_refused_before_anything_is_read(folder: Path) -> None:
    path = folder / form.WEIGHTS
    os.truncate(path, path.stat().st_size - 1)
    assert "cut off" in refused(folder)
    with pytest.raises(ModelError, match="cut off"):
        resolve(str(folder))


def test_missing_parts(folder: Path) -> None:
    (folder / form.WEIGHTS).rename(folder / "away")
    assert "packed.bin: the packed weights are missing" in refused(folder)
    (folder / "away").rename(folder / form.WEIGHTS)
    (folder / form.MANIFEST).unlink()
    assert "packed.json is missing" in refused(folder)


def test_a_changed_description_is_found(folder: Path) -> None:
    path = folder / form.MANIFEST
    path.write_text(path.read_text().replace('"hidden_size": 128', '"hidden_size": 256'))
    assert "does not match" in refused(folder) or "damaged" in refused(folder)
    path.write_text(path.read_text()[:-20])
    with pytest.raises(ModelError, match="not valid JSON"):
        logits(folder)
    path.write_text('{"name": "something else"}')
    assert "not written by `lmdeploy convert`" in refused(folder)


def rewrite(folder: Path, **changes: Any) -> None:
    """The description with other values and a right checksum, as another version would write it."""
    path = folder / form.MANIFEST
    body = json.loads(path.read_text())["packed"] | changes
    path.write_text(json.dumps({"sha256": form._digest(body), "packed": body}))


def test_other_versions_are_refused(folder: Path) -> None:
    rewrite(folder, form=99, lmdeploy="9.9")
    assert "form 99 by lmdeploy 9.9" in refused(folder)
    rewrite(folder, form=form.FORM, notes=3)
    assert "another version" in refused(folder)
    rewrite(folder, notes=[], layout="0-0-0")
    assert "in layout 0-0-0; this version" in refused(folder)


def test_other_packing_code_is_noticed_without_its_version(folder: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(native, "layout_fingerprint", lambda: 7)
    assert "layout" in refused(folder)


def test_a_changed_source_is_noticed(smoke_model: Path, folder: Path) -> None:
    weights = smoke_model / "model.safetensors"
    os.utime(weights, ns=(1, 1))
    logits(folder)  # another date alone is no change
    change(weights, -1)
    os.utime(weights, ns=(2, 2))
    message = refused(folder)
    assert f"{weights} has changed since it was converted" in message
    assert f"lmdeploy convert {smoke_model} {folder} --force" in message


def test_the_pytorch_engine_says_that_it_cannot(folder: Path) -> None:
    with pytest.raises(ModelError, match="converted for the native engine"):
        resolve(str(folder), PytorchEngineConfig())
    with pytest.raises(ModelError, match="packed for the native engine only"):
        open_checkpoint(folder).read("norm.weight")


def test_the_format_of_the_source_may_be_named(folder: Path) -> None:
    assert open_checkpoint(folder, "hf").packed is not None
    with pytest.raises(ModelError, match="converted from 'hf' files"):
        open_checkpoint(folder, "awq")


def test_steps_are_timed_only_where_prompts_wait_beside_streams(smoke_model: Path, monkeypatch: Any) -> None:
    timed: list[object] = []
    monkeypatch.setattr(build, "measure_step_cost", timed.append)
    for most in (1, 2):
        wanted = TurbomindEngineConfig(session_len=64, max_batch_size=most)
        build.build_engine(resolve(str(smoke_model), wanted))
    assert len(timed) == 1


def left_behind(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir() if entry.name != "model")


def test_too_little_disk_is_said_before(smoke_model: Path, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(conversion.shutil, "disk_usage", lambda _: (1 << 30, 0, 1 << 20))
    with pytest.raises(CapacityError, match=r"would take .* free on its disk"):
        convert(smoke_model, tmp_path / "packed")
    assert left_behind(tmp_path) == []


def test_too_little_memory_is_said_before(smoke_model: Path, tmp_path: Path) -> None:
    machine: Any = SimpleNamespace(memory_free=1 << 20, cores=1)
    with pytest.raises(CapacityError, match=r"packing takes .* are free"):
        convert(smoke_model, tmp_path / "packed", machine=machine)
    assert left_behind(tmp_path) == []


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt()])
def test_nothing_is_left_when_it_fails(
    smoke_model: Path, tmp_path: Path, monkeypatch: Any, error: BaseException
) -> None:
    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(layouts, "write_weights", fail)
    expected = KeyboardInterrupt if isinstance(error, KeyboardInterrupt) else ConfigError
    with pytest.raises(expected, match=r"No space left|^$"):
        convert(smoke_model, tmp_path / "packed")
    assert left_behind(tmp_path) == []


def test_what_is_there_is_kept_unless_told(smoke_model: Path, folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--force replaces it"):
        convert(smoke_model, folder)
    before = logits(folder)
    smoke.write_model(smoke_model, seed=1)
    convert(smoke_model, folder, force=True)
    assert not np.array_equal(logits(folder), before)
    with pytest.raises(ConfigError, match="holds other files"):
        convert(smoke_model, smoke_model, force=True)
    with pytest.raises(ConfigError, match="in packed form already"):
        convert(folder, tmp_path / "again")
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="is no folder"):
        convert(smoke_model, tmp_path / "file")
    assert left_behind(tmp_path) == ["file", "packed"]


def test_the_command(smoke_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["convert", str(smoke_model), str(tmp_path / "new" / "packed")]) == 0
    assert "of packed weights, written in" in capsys.readouterr().out
    assert np.isfinite(logits(tmp_path / "new" / "packed")).all()


@pytest.mark.parametrize(
    ("arguments", "answer"),
    [
        (["internlm2-chat", "{model}"], "no name is needed: lmdeploy convert {model} DIR"),
        (["internlm2-chat", "{model}", "--dst-path", "out"], "lmdeploy convert {model} out"),
        (["{model}"], "the folder to write is missing"),
        (["{model}", "out", "--tp", "2"], "--tp: packed weights serve any number of threads"),
        (
            ["{model}", "out", "--group-size", "0"],
            "--group-size: the group size is that of the model's files",
        ),
        (["{model}", "out", "--num-threads", "0"], "num_threads"),
    ],
)
def test_other_spellings_are_answered(
    smoke_model: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], answer: str
) -> None:
    words = [word.format(model=smoke_model) for word in arguments]
    assert main(["convert", *words]) == 2
    assert answer.format(model=smoke_model) in capsys.readouterr().err


def test_a_model_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["convert", str(tmp_path / "absent"), str(tmp_path / "packed")]) == 1
    assert "no such file or directory" in capsys.readouterr().err


def test_a_changed_layout_has_a_new_version(smoke_model: Path) -> None:
    """Fails when packing or placing changes: then raise LAYOUT_VERSION and put the new numbers here."""
    checkpoint = open_checkpoint(smoke_model)
    layout = model_layout(checkpoint.spec, {name: checkpoint.info(name) for name in checkpoint.names()})
    assert layouts.layout_name(layout) == "2-377fe5329f82ab48-1c39183097a0c0a1"
