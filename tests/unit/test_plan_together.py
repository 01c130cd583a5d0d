"""Several models under one memory budget: sums by hand, on headers of a tiny model."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from lmdeploy import TurbomindEngineConfig
from lmdeploy.cli.smoke import write_model
from lmdeploy.errors import CapacityError
from lmdeploy.runtime.machine import HugePages, Machine
from lmdeploy.runtime.memory_plan import server_bytes
from lmdeploy.runtime.together import Together, Wanted, resolve_together, together_table

MIB = 2**20


@pytest.fixture(autouse=True)
def _no_extension(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lmdeploy.runtime.resolve.kernel_sets", lambda: ("portable", "avx2"))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    directory = tmp_path_factory.mktemp("tiny")
    write_model(directory)
    return str(directory)


def machine(free: int) -> Machine:
    return Machine(
        cores=2,
        logical_cpus=4,
        cpu_quota=None,
        memory_total=8 * 2**30,
        memory_free=free,
        memory_bound="machine",
        huge_pages=HugePages("madvise", 0, 0, 2 * MIB),
        cpu_model="test",
        cpu_features=frozenset(),
    )


def planned(model: str, free: int, *shares: float, memory: int | None = None, **fields: Any) -> Together:
    fields = {"max_batch_size": 4096, **fields}
    wanted = [Wanted(model, TurbomindEngineConfig(**fields), share=share) for share in shares]
    return resolve_together(wanted, memory=memory, machine=machine(free))


def test_the_caches_have_the_given_shares_of_what_is_left(model: str) -> None:
    plan = planned(model, 700 * MIB, 3.0, 1.0, cache_max_entry_count=0.5)
    one, two = (config.plan for config in plan.configs)
    fixed = [p.weights + p.workspace + p.process for p in (one, two)]
    vocab = plan.configs[0].vocab_size
    assert plan.server == server_bytes(2 * vocab)  # the web server counts once
    room = 700 * MIB - sum(fixed) - plan.server
    block = one.kv_pool // one.num_blocks
    assert one.num_blocks == int(0.5 * int(room * 3 / 4)) // block
    assert two.num_blocks == int(0.5 * int(room / 4)) // block
    assert plan.total == plan.server + one.total + two.total <= 700 * MIB


def test_what_one_cannot_use_goes_to_the_other(model: str) -> None:
    wanted = [
        Wanted(model, TurbomindEngineConfig(max_batch_size=1, session_len=64)),
        Wanted(model, TurbomindEngineConfig(max_batch_size=4096)),
    ]
    small, large = resolve_together(wanted, machine=machine(700 * MIB)).configs
    even = planned(model, 700 * MIB, 1.0, 1.0).configs[1]
    assert (small.plan.bound, small.plan.num_blocks) == ("max_batch_size", 1)
    assert large.plan.num_blocks > 1.5 * even.plan.num_blocks


def test_the_budget_replaces_what_is_free(model: str) -> None:
    by_budget = planned(model, 4096 * MIB, 1.0, 1.0, memory=700 * MIB)
    assert by_budget.free == 700 * MIB
    assert by_budget.total <= 700 * MIB
    assert [c.plan for c in by_budget.configs] == [
        c.plan for c in planned(model, 700 * MIB, 1.0, 1.0).configs
    ]


def test_a_budget_that_is_not_there(model: str) -> None:
    with pytest.raises(CapacityError, match=r"a memory budget of 8\.00 GiB is more than the 700\.0 MiB"):
        planned(model, 700 * MIB, 1.0, memory=2**33)


def test_models_that_do_not_fit_are_refused_with_every_part(model: str) -> None:
    with pytest.raises(CapacityError) as caught:
        planned(model, 200 * MIB, 1.0, 1.0, 1.0)
    message = caught.value.message
    assert message.startswith("the models do not fit together: without any cache ")
    assert message.count(Path(model).name) == 3
    assert "but 200.0 MiB are free" in message


def test_a_share_too_small_names_the_model(model: str) -> None:
    wanted = [
        Wanted(model, TurbomindEngineConfig(max_batch_size=4096), share=1e6),
        Wanted(model, TurbomindEngineConfig(max_batch_size=4096, session_len=256), share=1e-3),
    ]
    with pytest.raises(CapacityError, match=r"its share 0\.001 of what all models leave"):
        resolve_together(wanted, machine=machine(700 * MIB))


def test_the_table_adds_up(model: str) -> None:
    plan = planned(model, 700 * MIB, 1.0, 1.0)
    lines = together_table(plan, ["one", "two"]).splitlines()
    assert lines[0].split()[:3] == ["model", "weights", "workspace"]
    assert [line.split()[0] for line in lines[1:3]] == ["one", "two"]
    assert lines[4].startswith("in all")
    assert lines[4].endswith("of 700.0 MiB free")
    changed = dataclasses.replace(plan, bound="/sys/fs/cgroup")
    assert "(/sys/fs/cgroup)" in together_table(changed, ["one", "two"])
