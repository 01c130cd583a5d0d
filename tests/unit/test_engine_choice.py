"""Which engine a model gets, on described machines and installations; and what is said about it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from lmdeploy import PytorchEngineConfig, TurbomindEngineConfig
from lmdeploy.cli.smoke import write_model
from lmdeploy.config import EngineConfig
from lmdeploy.errors import CapacityError, ConfigError, ModelError
from lmdeploy.models.registry import load_spec
from lmdeploy.pytorch.plan import torch_plan
from lmdeploy.runtime.engine_choice import Choice, Offers, choose_engine
from lmdeploy.runtime.gpu import Gpu, TorchInstall, read_gpus, read_torch
from lmdeploy.runtime.machine import HugePages, Machine
from lmdeploy.runtime.resolve import RuntimeConfig, plan_table, resolve

GIB = 2**30
CARD = Gpu("Some Card", 8 * GIB, 6 * GIB)
CPU_TORCH, CUDA_TORCH = TorchInstall("2.9.0+cpu", None), TorchInstall("2.9.0", "12.8")
REFUSAL = "head_dim 20 is not supported by the native engine"


def choose(
    config: EngineConfig | None = None,
    gpus: Sequence[Gpu] = (),
    torch: TorchInstall | None = None,
    refusal: str | None = None,
) -> Choice:
    return choose_engine(config or EngineConfig(), Offers(tuple(gpus), torch), refusal)


BEST: dict[str, tuple[dict[str, Any], tuple[str, str, str], str]] = {
    "nothing but a CPU": ({}, ("turbomind", "cpu", ""), "it computes this model"),
    "torch, no card": ({"torch": CUDA_TORCH}, ("turbomind", "cpu", ""), "no GPU"),
    "card and torch": (
        {"gpus": [CARD], "torch": CUDA_TORCH}, ("pytorch", "cuda", "bfloat16"), "there is a GPU"
    ),
    "card, no torch": ({"gpus": [CARD]}, ("turbomind", "cpu", ""), "it computes this model"),
    "card, torch for CPUs": (
        {"gpus": [CARD], "torch": CPU_TORCH}, ("turbomind", "cpu", ""), "it computes this model"
    ),
    "refused": ({"torch": CPU_TORCH, "refusal": REFUSAL}, ("pytorch", "cpu", "float32"), REFUSAL),
    "refused, with a card": (
        {"gpus": [CARD], "torch": CUDA_TORCH, "refusal": REFUSAL}, ("pytorch", "cuda", "bfloat16"), REFUSAL
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BEST)
def test_the_better_fit_and_why(name: str) -> None:
    offers, wanted, reason = BEST[name]
    choice = choose(**offers)
    assert (choice.backend, choice.device, choice.dtype) == wanted
    line = choice.line()
    assert line.startswith(f"{wanted[0]} on the {'Some Card' if wanted[1] == 'cuda' else 'CPU'}")
    assert reason in line
    assert "\n" not in line
    unused = wanted[0] == "turbomind" and "gpus" in offers
    assert (choice.note is not None) == unused


@pytest.mark.parametrize(
    ("torch", "remedy"), [(None, "pip install lmdeploy[torch]"), (CPU_TORCH, "install a CUDA build of it")]
)
def test_a_card_that_lies_idle_is_said_with_the_remedy(torch: TorchInstall | None, remedy: str) -> None:
    note = choose(gpus=[CARD], torch=torch).note
    assert note is not None
    assert "Some Card is not used" in note
    assert remedy in note


def test_refused_without_torch_names_the_extra() -> None:
    with pytest.raises(ModelError, match=r"head_dim 20 .*: pip install lmdeploy\[torch\]"):
        choose(refusal=REFUSAL)
    with pytest.raises(ModelError, match=r"head_dim 20 .* --backend pytorch"):
        choose(TurbomindEngineConfig(), refusal=REFUSAL)


def test_the_native_engine_beside_a_card_says_who_would_use_it() -> None:
    choice = choose(TurbomindEngineConfig(), [CARD], CUDA_TORCH)
    assert (choice.backend, choice.device) == ("turbomind", "cpu")
    assert choice.note is not None
    assert "Some Card is not used" in choice.note
    assert "the PyTorch engine would use it" in choice.note
    without = choose(TurbomindEngineConfig(), [CARD]).note
    assert without is not None and "pip install lmdeploy[torch]" in without
    assert choose(TurbomindEngineConfig(), torch=CUDA_TORCH).note is None


def test_the_pytorch_engine_as_asked() -> None:
    gpus = [CARD]
    assert choose(PytorchEngineConfig(), gpus, CUDA_TORCH).device == "cuda"
    assert choose(PytorchEngineConfig(device_type="cpu"), gpus, CUDA_TORCH).device == "cpu"
    assert choose(PytorchEngineConfig(), gpus, CPU_TORCH).device == "cpu"
    assert choose(PytorchEngineConfig(dtype="float16"), gpus, CUDA_TORCH).dtype == "float16"
    with pytest.raises(ConfigError, match=r"not installed: pip install lmdeploy\[torch\]"):
        choose(PytorchEngineConfig())
    with pytest.raises(ConfigError, match="device_type=cuda: this machine has no NVIDIA GPU"):
        choose(PytorchEngineConfig(device_type="cuda"), torch=CUDA_TORCH)
    with pytest.raises(ConfigError, match=r"device_type=cuda: torch .* built without CUDA"):
        choose(PytorchEngineConfig(device_type="cuda"), gpus, CPU_TORCH)


def machine(free: int = 4 * GIB) -> Machine:
    pages = HugePages("madvise", 0, 0, 2**21)
    return Machine(2, 4, None, 8 * GIB, free, "machine", pages, "test", frozenset())


@pytest.fixture(autouse=True)
def _no_extension(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lmdeploy.runtime.resolve.kernel_sets", lambda: ("portable",))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    directory = tmp_path_factory.mktemp("tiny")
    write_model(directory)
    return str(directory)


def resolved(model: str, config: EngineConfig | None = None, card: Gpu | None = CARD) -> RuntimeConfig:
    return resolve(model, config, machine=machine(), offers=Offers((card,) if card else (), CUDA_TORCH))


def test_a_card_is_planned_with_its_own_memory(model: str) -> None:
    config = resolved(model)
    assert (config.backend, config.device, config.dtype, config.kernels) == (
        "pytorch",
        "cuda",
        "bfloat16",
        "",
    )
    assert (config.plan.free, config.plan.free_bound) == (CARD.memory_free, "Some Card")
    text = plan_table(config)
    assert "engine     pytorch on the Some Card in bfloat16: there is a GPU" in text
    assert "free on Some Card" in text
    assert "kernels" not in text


def test_figures_are_those_of_the_type(model: str) -> None:
    wide = resolved(model, PytorchEngineConfig(dtype="float32", device_type="cpu"))
    narrow = resolved(model, PytorchEngineConfig(dtype="bfloat16", device_type="cpu"))
    assert wide.plan.kv_per_token == 2 * narrow.plan.kv_per_token
    assert wide.plan.weights > 1.9 * narrow.plan.weights
    assert wide.plan.free == machine().memory_free


def test_what_does_not_fit_is_refused_on_either_device(model: str) -> None:
    small = dataclasses.replace(CARD, memory_free=2**20)
    with pytest.raises(CapacityError, match=r"does not fit: .* on the Some Card"):
        resolved(model, PytorchEngineConfig(), small)
    with pytest.raises(CapacityError, match="the model does not fit"):
        resolve(
            model,
            PytorchEngineConfig(device_type="cpu"),
            machine=machine(2**20),
            offers=Offers((), CPU_TORCH),
        )


def test_a_small_card_that_nobody_asked_for_does_not_stand_in_the_way(model: str) -> None:
    config = resolved(model, None, dataclasses.replace(CARD, memory_free=2**20))
    assert (config.backend, config.device) == ("turbomind", "cpu")
    assert "the Some Card is too small" in config.engine


def test_the_unused_card_is_in_the_account(model: str) -> None:
    config = resolved(model, TurbomindEngineConfig())
    (caution,) = config.cautions
    assert "Some Card is not used" in caution
    assert caution in plan_table(config)


def test_a_missing_extension_leaves_torch(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> Any:
        raise ImportError("GLIBCXX_3.4.32 not found")

    monkeypatch.setattr("lmdeploy.runtime.resolve.kernel_sets", fail)
    config = resolved(model, None, None)
    assert config.backend == "pytorch"
    assert "GLIBCXX_3.4.32" in config.engine


def test_a_model_the_native_engine_cannot_compute(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lmdeploy.turbomind.layout.MAX_HEAD_DIM", 16)
    config = resolved(model, None, None)
    assert (config.backend, config.device, config.dtype) == ("pytorch", "cpu", "float32")
    assert "head_dim 32" in config.engine


def test_a_type_that_only_torch_has_takes_torch(model: str) -> None:
    dtype = "float32"
    config = resolved(model, EngineConfig(dtype=dtype), None)
    assert (config.backend, config.device, config.dtype) == ("pytorch", "cpu", dtype)
    assert (
        f"dtype={dtype} is not supported by the native engine (supported: auto, bfloat16, float16)"
        in config.engine
    )
    assert resolved(model, EngineConfig(dtype=dtype)).device == "cuda"
    # A card that is too small is no reason to compute in another type than was asked for.
    with pytest.raises(CapacityError, match="on the Some Card"):
        resolved(model, EngineConfig(dtype=dtype), dataclasses.replace(CARD, memory_free=2**20))
    for offers in (Offers((), None), Offers((CARD,), None)):
        with pytest.raises(ModelError, match=rf"dtype={dtype} .*pip install lmdeploy\[torch\]"):
            resolve(model, EngineConfig(dtype=dtype), machine=machine(), offers=offers)
    with pytest.raises(ConfigError, match=rf"dtype='{dtype}': must be .* --backend pytorch"):
        TurbomindEngineConfig(dtype=dtype)
    for both in ("bfloat16", "float16"):
        config = resolved(model, EngineConfig(dtype=both), None)
        assert (config.backend, config.dtype) == ("turbomind", both)


SMI = "GPU-aaa, Card A, 8192, 6144\nGPU-bbb, Card B, 4096, [N/A]\n"


@pytest.mark.parametrize(
    ("visible", "names"),
    [
        (None, ["Card A", "Card B"]),
        ("1", ["Card B"]),
        ("1,0", ["Card B", "Card A"]),
        ("GPU-b", ["Card B"]),
        ("-1", []),
        ("0,7,1", ["Card A"]),
    ],
)
def test_cards_come_from_the_driver(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, visible: str | None, names: list[str]
) -> None:
    def smi(command: Sequence[str]) -> str:
        return SMI

    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    else:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert read_gpus(tmp_path, smi) == ()  # nothing is asked without a driver
    (tmp_path / "proc/driver/nvidia").mkdir(parents=True)
    (tmp_path / "proc/driver/nvidia/version").write_text("NVRM version")
    found = read_gpus(tmp_path, smi)
    assert [gpu.name for gpu in found] == names
    assert all(gpu.memory_free == 6144 << 20 for gpu in found if gpu.name == "Card A")
    assert read_gpus(tmp_path, lambda command: None) == ()


def test_torch_is_read_from_its_files(tmp_path: Path) -> None:
    assert read_torch(None) is None
    assert read_torch(tmp_path) is None
    (tmp_path / "version.py").write_text("__version__ = '2.9.0'\ncuda: Optional[str] = '12.8'\n")
    assert read_torch(tmp_path) == CUDA_TORCH


def test_torch_names_what_it_cannot_compute(model: str) -> None:
    spec = load_spec(model)
    layer = spec.layers[0]
    heads = dataclasses.replace(layer, attention=dataclasses.replace(layer.attention, num_kv_heads=3))
    experts = dataclasses.replace(layer, ffn=dataclasses.replace(layer.ffn, kind="experts"))
    for wrong, words in ((heads, "4 query heads over 3"), (experts, "kind 'experts'")):
        with pytest.raises(ModelError, match=words):
            torch_plan(dataclasses.replace(spec, layers=(wrong,)), "float32", "cpu", 64)
