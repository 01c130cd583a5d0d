"""What is read of a model's description, and what is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from demo_model import demo_gguf
from gguf import GGMLQuantizationType as Kind
from gguf_files import write_llama
from hf_files import CONFIG, write_hf

from lmdeploy.errors import ConfigError, ModelError
from lmdeploy.models.hub import resolve_model_path
from lmdeploy.models.registry import load_spec, open_checkpoint
from lmdeploy.models.rope import inverse_frequencies, llama3_divisors
from lmdeploy.models.spec import RopeSpec


def spec_of(path: Path, **config: Any) -> Any:
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(
        json.dumps({k: v for k, v in {**CONFIG, **config}.items() if v != "drop"})
    )
    return load_spec(path)


def test_demo_spec_is_that_of_the_model_card() -> None:
    spec = load_spec(demo_gguf())
    assert (spec.family, spec.hidden_size, spec.vocab_size, spec.max_position) == ("llama", 576, 49152, 8192)
    assert (len(spec.layers), spec.tie_embeddings) == (30, True)
    attention, ffn = spec.layers[0].attention, spec.layers[0].ffn
    assert (attention.num_heads, attention.num_kv_heads, attention.head_dim) == (9, 3, 64)
    assert (attention.rope, ffn.intermediate_size) == (RopeSpec(100000.0, 64), 1536)
    assert spec.norm.eps == pytest.approx(1e-5)
    assert spec.kv_bytes_per_token() == 2 * 30 * 3 * 64 * 2


def test_defaults_of_absent_fields(tmp_path: Path) -> None:
    spec = spec_of(
        tmp_path, head_dim="drop", num_key_value_heads="drop", rope_theta="drop", rms_norm_eps="drop"
    )
    attention = spec.layers[0].attention
    assert (attention.head_dim, attention.num_kv_heads, attention.rope.theta) == (6, 4, 10000.0)
    assert spec.norm.eps == 1e-6


def test_rope_in_both_spellings(tmp_path: Path) -> None:
    llama3 = {
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    expected = RopeSpec(500000.0, 8, "llama3", 32.0, 1.0, 4.0, 8192)
    forms = [
        {"rope_theta": 500000.0, "rope_scaling": {**llama3, "rope_type": "llama3"}},
        {"rope_theta": 500000.0, "rope_scaling": {**llama3, "type": "llama3"}},
        {"rope_theta": "drop", "rope_parameters": {**llama3, "rope_type": "llama3", "rope_theta": 500000.0}},
    ]
    for form in forms:
        assert spec_of(tmp_path, **form).layers[0].attention.rope == expected
    assert spec_of(tmp_path, rope_scaling=None).layers[0].attention.rope == RopeSpec(10000.0, 8)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (
            {"architectures": ["FooForCausalLM"]},
            "architecture 'FooForCausalLM' is not supported (supported: ",
        ),
        ({"architectures": []}, "names no model architecture"),
        ({"architectures": "drop"}, "names no model architecture"),
        ({"hidden_act": "relu6"}, "hidden_act is 'relu6', which is not supported"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": "x"}}, "factor is 'x'"),
        ({"rope_scaling": {"type": "foo"}}, "is of kind 'foo', which is not supported (supported: default,"),
        ({"rope_parameters": {"type": "foo"}}, "is of kind 'foo', which is not supported"),
        ({"rope_scaling": {"rope_type": "linear"}}, "factor is missing"),
        (
            {"rope_scaling": {"type": "yarn", "factor": 2.0, "beta_fast": 1e308}},
            "rope_scaling does not give finite frequencies",
        ),
        (
            {"rope_parameters": {"type": "longrope", "short_factor": [1.0] * 4, "long_factor": [1.0] * 3}},
            "long_factor is [1.0, 1.0, 1.0]; a list of 4",
        ),
        (
            {"rope_parameters": {"type": "yarn", "factor": 2, "llama_4_scaling_beta": 0.1}},
            "llama_4_scaling_beta",
        ),
        ({"partial_rotary_factor": 0.4}, "partial_rotary_factor is 0.4"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types holds 'sliding_attention'"),
        ({"quantization_config": {"quant_method": "bitsandbytes"}}, "is of method 'bitsandbytes'"),
        ({"sliding_window": 128}, "sliding_window is 128, which changes the computation"),
        ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping is 50.0"),
        ({"num_local_experts": 8}, "num_local_experts is 8"),
        ({"hidden_size": "drop"}, "hidden_size is missing"),
        ({"hidden_size": -3}, "hidden_size is -3"),
        ({"hidden_size": "24"}, "hidden_size is '24'"),
        ({"num_hidden_layers": 1 << 40}, "num_hidden_layers is 1099511627776"),
        ({"num_key_value_heads": 3}, "num_key_value_heads is 3, which does not divide"),
        ({"head_dim": 7}, "head_dim is 7"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps is nan"),
        ({"rope_theta": 0}, "rope_theta is 0"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings is 'yes'"),
    ],
)
def test_refusals_name_the_field(config: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError) as caught:
        spec_of(tmp_path, **config)
    assert words in str(caught.value)
    assert "config.json" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("metadata", "words"),
    [
        ({"block_count": 0}, "llama.block_count is 0"),
        ({"block_count": 4000000000}, "llama.block_count is 4000000000"),
        ({"block_count": 3}, "'blk.2.attn_q.weight' is missing"),
        ({"block_count": 1}, "has no place in a llama model with 1 layers"),
        ({"embedding_length": 32}, "has shape"),
        ({"attention__head_count_kv": 3}, "does not divide"),
        ({"rope__scaling__type": "foo"}, "llama.rope.scaling.type is 'foo'"),
        ({"rope__dimension_count": 7}, "llama.rope.dimension_count is 7"),
        ({"attention__sliding_window": 128}, "llama.attention.sliding_window is 128"),
        ({"logit_scale": 4.0}, "llama.logit_scale is 4.0"),
        ({"expert_count": 8}, "mixtures of experts"),
        ({"embedding_length": 1 << 22}, "llama.attention.key_length is 1048576"),
        (
            {"attention__head_count": 1 << 24, "attention__head_count_kv": 1, "attention__key_length": 256},
            "has shape [64, 64]; [4294967296, 64] is expected",
        ),
    ],
)
def test_gguf_refusals_name_the_key(metadata: dict[str, Any], words: str, tmp_path: Path) -> None:
    path = write_llama(tmp_path / "m.gguf", Kind.F32, **metadata)
    with pytest.raises(ModelError) as caught:
        open_checkpoint(path)
    assert words in str(caught.value)
    assert "m.gguf" in str(caught.value)


def test_untied_gguf_has_a_head(tmp_path: Path) -> None:
    assert "lm_head.weight" in open_checkpoint(write_llama(tmp_path / "m.gguf", tied=False)).names()
    assert "lm_head.weight" not in open_checkpoint(write_llama(tmp_path / "n.gguf", tied=True)).names()


@pytest.mark.parametrize("form", ["zero", "minimum", "eight bit"])
def test_row_selection_reaches_every_part_of_a_grouped_tensor(form: str, tmp_path: Path) -> None:
    kind = {"zero": Kind.Q4_0, "minimum": Kind.Q4_1, "eight bit": Kind.Q8_0}[form]
    checkpoint = open_checkpoint(write_llama(tmp_path / "m.gguf", kind))
    tensor = checkpoint.read("layers.0.attn.q_proj.weight")
    assert (tensor.zeros is None, tensor.mins is None) == (form != "zero", form != "minimum")
    order = np.arange(64).reshape(4, 8, 2).swapaxes(1, 2).reshape(-1)
    stored = checkpoint._store.read("blk.0.attn_q.weight").dequantize()
    assert np.array_equal(tensor.dequantize(), stored[order])


def test_model_format_must_agree_with_the_files(tmp_path: Path) -> None:
    directory = write_hf(tmp_path / "hf")
    for path, good, bad in ((directory, "hf", "gguf"), (demo_gguf(), "gguf", "hf")):
        open_checkpoint(path, good)
        open_checkpoint(path, None)
        with pytest.raises(ModelError, match=f"model_format is '{bad}', but the files are '{good}'"):
            open_checkpoint(path, bad)
        with pytest.raises(ModelError, match=f"model_format is 'awq', but the files are '{good}'"):
            open_checkpoint(path, "awq")
        readable = "hf, gguf, awq, gptq, compressed-tensors, fp8, smooth_quant"
        for unread in ("mxfp4", "foo"):
            with pytest.raises(ModelError, match=rf"'{unread}' cannot be read \(readable: {readable}\)"):
                open_checkpoint(path, unread)


def test_a_directory_may_hold_one_gguf_file(tmp_path: Path) -> None:
    write_llama(tmp_path / "a.gguf")
    assert load_spec(tmp_path) == load_spec(tmp_path / "a.gguf")
    write_llama(tmp_path / "b.gguf")
    with pytest.raises(ModelError, match=r"holds 2 \.gguf files \(a\.gguf, b\.gguf\)"):
        load_spec(tmp_path)


def test_paths_that_are_no_models(tmp_path: Path) -> None:
    (tmp_path / "x.txt").write_text("hello")
    for path, words in (
        (tmp_path / "none", "no such file"),
        (tmp_path / "x.txt", "not a model"),
        (tmp_path, "neither"),
        (Path("/dev/null"), "/dev/null: neither a file nor a directory"),
    ):
        with pytest.raises(ModelError, match=words):
            load_spec(path)


def test_llama3_divisors_at_their_ends() -> None:
    """Short waves are kept, long ones divided by the factor (Llama 3.1: 8192 positions, factors 1 and 4)."""
    rope = RopeSpec(500000.0, 128, "llama3", 8.0, 1.0, 4.0, 8192)
    waves = 2 * np.pi / inverse_frequencies(RopeSpec(500000.0, 128))
    divisors = llama3_divisors(rope)
    assert np.all(divisors[waves < 8192 / 4] == 1)
    assert np.allclose(divisors[waves > 8192], 8)
    between = (waves > 8192 / 4) & (waves < 8192)
    assert np.all(np.diff(divisors[between]) > 0)


def test_hub_ids_without_a_network(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ModelError, match="owner/name: not in the local cache, and HF_HUB_OFFLINE is set"):
        resolve_model_path("owner/name", download_dir=str(tmp_path))


def test_hub_that_cannot_be_reached(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import httpx
    import huggingface_hub

    def fail(*args: Any, **kwargs: Any) -> None:
        raise httpx.ConnectError("Name or service not known\nsecond line")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(ModelError, match="owner/name: download failed: Name or service not known; try again"):
        resolve_model_path("owner/name", download_dir=str(tmp_path))


@pytest.mark.parametrize("offline", [True, False])
def test_cache_that_cannot_be_written(offline: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import huggingface_hub
    from huggingface_hub import constants

    def fail(*args: Any, **kwargs: Any) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", offline)
    if not offline:
        monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    folder = tmp_path / "file" / "cache"
    folder.parent.write_text("no folder can be made below a file, whoever runs this")
    with pytest.raises(ModelError, match=f"download folder {folder} cannot be written; choose another"):
        resolve_model_path("owner/name", download_dir=str(folder))


def test_a_model_argument_is_a_path_first(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "owner" / "name").mkdir(parents=True)
    assert resolve_model_path("owner/name") == Path("owner/name")
    for wrong in ("no/such/path", "./missing", "name", "a/b.gguf", "/abs/x"):
        with pytest.raises(ModelError, match="no such file or directory, and not a hub id"):
            resolve_model_path(wrong)
    for wrong in ("a--b/c", "a..b/c", "a/b.git", "aé/b", "a/" + "x" * 120):
        with pytest.raises(ModelError, match="no such path, and not a hub id"):
            resolve_model_path(wrong)
    for empty in ("", " "):
        with pytest.raises(ModelError, match="name of the model is empty"):
            resolve_model_path(empty)
    monkeypatch.setenv("LMDEPLOY_USE_MODELSCOPE", "True")
    with pytest.raises(ConfigError, match="ModelScope"):
        resolve_model_path("other/name")
