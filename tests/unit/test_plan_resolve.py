"""`resolve`: user config + model headers + machine -> one concrete plan, and what the engine makes of it."""

from __future__ import annotations

import dataclasses
import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lmdeploy import SpeculativeConfig, TurbomindEngineConfig
from lmdeploy.cli.smoke import HEAD_DIM, KV_HEADS, LAYERS, write_model
from lmdeploy.engine.fake import FakeExecutor
from lmdeploy.engine.lanes import LaneOptions
from lmdeploy.engine.loop import Engine
from lmdeploy.engine.request import Request
from lmdeploy.engine.scheduler import EngineOptions
from lmdeploy.errors import CapacityError, ConfigError, ModelError
from lmdeploy.models.registry import load_spec
from lmdeploy.models.spec import RopeSpec
from lmdeploy.runtime.machine import HugePages, Machine
from lmdeploy.runtime.memory_plan import MAX_BODIES, server_bytes
from lmdeploy.runtime.resolve import SERVER_QUEUE, RuntimeConfig, longest_allowed, plan_table, resolve

MIB, GIB = 2**20, 2**30
MODEL_LEN = 256  # of the tiny model


def machine(**changes: Any) -> Machine:
    plain = Machine(
        cores=2,
        logical_cpus=4,
        cpu_quota=None,
        memory_total=8 * GIB,
        memory_free=4 * GIB,
        memory_bound="machine",
        huge_pages=HugePages("madvise", 0, 0, 2 * MIB),
        cpu_model="test",
        cpu_features=frozenset(),
    )
    return dataclasses.replace(plain, **changes)


@pytest.fixture(autouse=True)
def _no_extension(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lmdeploy.runtime.resolve.kernel_sets", lambda: ("portable", "avx2"))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    directory = tmp_path_factory.mktemp("tiny")
    write_model(directory)
    return str(directory)


def resolved(model: str, on: Machine | None = None, **fields: Any) -> RuntimeConfig:
    return resolve(model, TurbomindEngineConfig(**fields), machine=on or machine())


def memory_for(model: str, blocks: int, **fields: Any) -> Machine:
    """A machine on which `blocks` cache blocks fit and no more."""
    plan = resolved(model, **fields).plan
    share = fields.get("cache_max_entry_count", 0.8)
    room = int((blocks + 0.5) * plan.kv_per_token * plan.block_size / share)
    return machine(memory_free=plan.total - plan.kv_pool + room)


def test_everything_is_concrete_and_travels_to_another_process(model: str) -> None:
    config = resolved(model)
    assert (config.session_len, config.max_batch_size, config.limits.num_threads) == (MODEL_LEN, 32, 2)
    assert config.plan.kv_per_token == 2 * LAYERS * KV_HEADS * (HEAD_DIM * 2 + 2)
    assert config.plan.num_blocks == 32 * MODEL_LEN // 64
    assert config.plan.bound == "max_batch_size"
    assert config.kernels == "avx2"
    assert config.notes == (f"session_len is {MODEL_LEN}, the model's own",)
    assert pickle.loads(pickle.dumps(config)) == config


def test_a_server_is_planned_as_two_processes(model: str) -> None:
    """A control group must hold the web server too, with what it has taken and what bodies will take."""
    wanted = TurbomindEngineConfig(session_len=MODEL_LEN, max_batch_size=1)
    alone = resolve(model, wanted, machine=machine())
    share = server_bytes(alone.vocab_size)
    assert share > 2 * MAX_BODIES
    assert (alone.plan.server, "server" in plan_table(alone)) == (0, False)
    taken = 30 * MIB
    group = machine(memory_free=alone.plan.total * 2 + share - taken, own_memory=taken)
    served = resolve(model, wanted, machine=group, server=True)
    assert served.plan.server == share
    assert served.plan.total == alone.plan.total + share
    assert "request bodies" in plan_table(served)
    tight = machine(memory_free=alone.plan.total * 2 - taken, own_memory=taken)
    resolve(model, wanted, machine=tight)
    with pytest.raises(CapacityError, match="server"):
        resolve(model, wanted, machine=tight, server=True)


def test_session_len_and_max_batch_size_change_plan_and_pool(model: str) -> None:
    base, shorter = resolved(model).plan, resolved(model, session_len=128).plan
    assert shorter.num_blocks * 2 == base.num_blocks
    assert shorter.workspace <= base.workspace
    fewer = resolved(model, max_batch_size=4).plan
    assert fewer.num_blocks * 8 == base.num_blocks
    assert fewer.sequences == 4
    assert fewer.workspace < base.workspace


def test_memory_limit_changes_the_pool_and_says_where_it_comes_from(model: str) -> None:
    limited = dataclasses.replace(memory_for(model, 9), memory_bound="/sys/fs/cgroup/job")
    config = resolved(model, limited)
    assert config.plan.num_blocks == 9
    assert (config.plan.sequences, config.plan.bound) == (2, "memory")
    assert "limited by /sys/fs/cgroup/job" in plan_table(config)


@pytest.mark.parametrize(("quant_policy", "head"), [(8, HEAD_DIM + 4), (4, HEAD_DIM // 2 + 4)])
def test_fewer_bits_make_more_blocks_and_are_said(model: str, quant_policy: int, head: int) -> None:
    tight = memory_for(model, 9)
    plain, config = resolved(model, tight), resolved(model, tight, quant_policy=quant_policy)
    assert config.plan.kv_per_token == 2 * LAYERS * KV_HEADS * head
    gain = plain.plan.kv_per_token / config.plan.kv_per_token
    assert config.plan.num_blocks == int(9.5 * gain)
    assert f"{quant_policy} bits a value" in plan_table(config)
    assert "bits a value" not in plan_table(plain)
    assert config.limits.kv_bits == quant_policy


def test_the_default_length_shrinks_to_what_fits_and_says_so(model: str) -> None:
    config = resolved(model, memory_for(model, 3))
    assert config.session_len == 3 * 64
    assert config.notes == ()
    assert config.cautions == (
        f"session_len is 192, the largest that fits in memory; the model's own is {MODEL_LEN}",
    )
    assert config.cautions[0] in plan_table(config)
    # The figures are those of the shorter length, to the byte.
    assert config.plan == resolved(model, memory_for(model, 3), session_len=192).plan


def test_a_length_that_does_not_fit_is_refused(model: str) -> None:
    with pytest.raises(CapacityError, match="set session_len to at most 192"):
        resolved(model, memory_for(model, 3), session_len=256)
    with pytest.raises(CapacityError, match="the model does not fit"):
        resolved(model, machine(memory_free=MIB))


def test_a_length_beyond_the_model_is_refused(model: str) -> None:
    with pytest.raises(ConfigError, match=f"session_len=257 .* at most {MODEL_LEN}") as caught:
        resolved(model, session_len=257)
    assert caught.value.param == "session_len"


@pytest.mark.parametrize(
    ("rope", "longest"),
    [
        (RopeSpec(1e4, 32), 256),
        (RopeSpec(1e4, 32, kind="linear", factor=4.0), 1024),
        (RopeSpec(1e4, 32, kind="yarn", factor=4.0, original_max_position=128), 512),
        (RopeSpec(1e4, 32, kind="llama3", factor=8.0, original_max_position=128), 256),
        (None, 256),
    ],
)
def test_rope_scaling_may_go_beyond_the_models_own_length(
    model: str, rope: RopeSpec | None, longest: int
) -> None:
    spec = load_spec(model)
    layers = tuple(
        dataclasses.replace(x, attention=dataclasses.replace(x.attention, rope=rope)) for x in spec.layers
    )
    assert longest_allowed(dataclasses.replace(spec, layers=layers)) == longest


def test_threads_come_from_config_then_environment_then_machine(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert resolved(model, machine(cores=3)).limits.num_threads == 3
    monkeypatch.setenv("LMDEPLOY_NUM_THREADS", "5")
    config = resolved(model, machine(cores=3))
    assert config.limits.num_threads == 5
    assert "5 threads share 4 CPUs: fewer would be faster" in config.cautions
    assert resolved(model, num_threads=1).limits.num_threads == 1
    monkeypatch.setenv("LMDEPLOY_NUM_THREADS", "many")
    with pytest.raises(ConfigError, match="LMDEPLOY_NUM_THREADS=many"):
        resolved(model)


def test_unknown_kernel_set_is_refused(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LMDEPLOY_KERNELS", "mmx")
    with pytest.raises(ConfigError, match="LMDEPLOY_KERNELS=mmx: must be one of portable"):
        resolved(model)
    monkeypatch.setenv("LMDEPLOY_KERNELS", "avx512")
    with pytest.raises(ConfigError, match="LMDEPLOY_KERNELS=avx512: this CPU runs portable, avx2 only"):
        resolved(model)
    monkeypatch.setenv("LMDEPLOY_KERNELS", "portable")
    assert resolved(model).kernels == "portable"


@pytest.mark.parametrize("mode", ["never", "absent"])
def test_missing_huge_pages_are_a_note(model: str, mode: str) -> None:
    small = resolved(model, on=machine(huge_pages=HugePages(mode, 0, 0, 2 * MIB)))
    assert f"transparent huge pages are {mode}" in plan_table(small)
    assert "small pages" not in plan_table(resolved(model))


def test_kernels_for_any_cpu_are_a_note(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "slow" not in plan_table(resolved(model))
    monkeypatch.setenv("LMDEPLOY_KERNELS", "portable")
    assert "the portable kernels compute, which are slow" in plan_table(resolved(model))
    monkeypatch.delenv("LMDEPLOY_KERNELS")
    monkeypatch.setattr("lmdeploy.runtime.resolve.kernel_sets", lambda: ("portable",))
    assert "is missing or was turned off" in plan_table(resolved(model))


def test_wrong_paths_and_formats(model: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no-such-model"):
        resolved("no-such-model")
    with pytest.raises(ModelError, match="gguf"):
        resolved(model, model_format="gguf")
    with pytest.raises(ModelError):
        resolved(str(tmp_path))


def test_the_account_in_words(model: str) -> None:
    config = resolved(model)
    plan, text = config.plan, plan_table(config)
    assert plan.total == plan.weights + plan.kv_pool + plan.workspace + plan.process
    assert f"32 sequences of {MODEL_LEN} tokens, limited by max_batch_size" in text
    assert "KV cache" in text
    assert len(text.splitlines()) < 12


def test_a_draft_model_is_planned_beside_the_model(model: str, tmp_path: Path) -> None:
    write_model(tmp_path, seed=1)
    speculative = SpeculativeConfig(model=str(tmp_path))
    config = TurbomindEngineConfig(session_len=128, max_batch_size=2)
    alone = resolve(model, config, machine=machine())
    both = resolve(model, config, speculative=speculative, machine=machine())
    first, second = alone.plan, both.plan
    assert (second.weights, second.workspace, second.kv_pool) == (
        first.weights,
        first.workspace,
        first.kv_pool,
    )
    # The draft model is of the same shape here.
    assert second.draft == first.weights + first.workspace + first.kv_pool
    assert second.total == first.total + second.draft
    assert both.speculative is not None
    assert both.speculative.model == str(tmp_path)
    table = plan_table(both)
    assert "draft " in table
    assert "speculation up to 8 tokens ahead, from " in table
    assert "draft " not in plan_table(alone)


def test_what_a_draft_model_takes_is_missing_from_the_pool(model: str, tmp_path: Path) -> None:
    write_model(tmp_path, seed=1)
    few = memory_for(model, 7, session_len=64, max_batch_size=2)
    config = TurbomindEngineConfig(session_len=64, max_batch_size=2)
    assert resolve(model, config, machine=few).plan.num_blocks > 0
    with pytest.raises(CapacityError, match="draft model"):
        resolve(model, config, speculative=SpeculativeConfig(model=str(tmp_path)), machine=few)


def test_a_draft_model_of_another_vocabulary_is_refused(model: str, tmp_path: Path) -> None:
    write_model(tmp_path)
    tokenizer = json.loads((tmp_path / "tokenizer.json").read_text())
    words = tokenizer["model"]["vocab"]
    words["a"], words["b"] = words["b"], words["a"]
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(ConfigError, match="another vocabulary"):
        resolve(model, speculative=SpeculativeConfig(model=str(tmp_path)), machine=machine())


def running_at_once(config: RuntimeConfig, requests: int, prompt_len: int) -> tuple[int, int]:
    """Most sequences that ran together, and preemptions; each grows to session_len tokens."""
    executor = FakeExecutor(
        block_size=config.plan.block_size,
        num_blocks=config.plan.num_blocks,
        max_rows=config.limits.max_rows,
        max_step_tokens=config.limits.max_step_tokens,
    )
    engine = Engine(executor, EngineOptions(max_batch_size=config.max_batch_size))
    for i in range(requests):
        prompt = np.full(prompt_len, i + 1, np.int32)
        engine.add(Request(f"r{i}", prompt, max_new_tokens=config.session_len - prompt_len))
    most = 0
    while engine.has_work:
        engine.step()
        most = max(most, engine.stats().running)
    return most, engine.stats().totals.preemptions


@pytest.mark.parametrize(
    ("blocks", "fields", "at_once"),
    [(9, {}, 2), (13, {}, 3), (13, {"session_len": 128}, 6), (13, {"max_batch_size": 2}, 2)],
)
def test_admission_follows_the_plan(model: str, blocks: int, fields: dict[str, Any], at_once: int) -> None:
    config = resolved(model, memory_for(model, blocks, **fields), **fields)
    full = config.session_len - 8
    assert config.plan.sequences == at_once
    assert running_at_once(config, at_once, full) == (at_once, 0)
    assert running_at_once(config, at_once + 2, full) == (at_once, 0)
    assert running_at_once(config, at_once, 8) == (at_once, 0)
    most, preemptions = running_at_once(config, at_once + 1, 8)
    if config.plan.bound == "max_batch_size":
        assert (most, preemptions) == (at_once, 0)
    else:
        assert preemptions > 0


def test_lanes_and_queue_are_settled(model: str) -> None:
    quiet = resolved(model)
    assert (quiet.lanes, quiet.max_queue, quiet.batching_window) == (None, None, 0.0)
    fields = {"long_prompt_threshold": 100, "long_prompt_step_share": 0.3, "long_prompt_cache_share": 0.4}
    assert resolved(model, **fields).lanes == LaneOptions(100, 0.3, 0.4)
    asked = TurbomindEngineConfig(max_queued_requests=7, batching_window=0.01)
    config = resolve(model, asked, machine=machine(), server=True)
    assert (config.max_queue, config.batching_window) == (7, 0.01)
    server = resolve(model, TurbomindEngineConfig(), machine=machine(), server=True)
    assert server.max_queue == SERVER_QUEUE
