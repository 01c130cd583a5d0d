"""What the user said + the model's headers + the machine -> one concrete, immutable `RuntimeConfig`.

Decides everything that is decided before the engine exists, once; nothing is patched afterwards. Reads
headers and never a weight. The result can be pickled: the engine process is built from it alone.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from lmdeploy import env
from lmdeploy.config import DEFAULT_MAX_BATCH_SIZE, NATIVE_DTYPES, EngineConfig, TurbomindEngineConfig
from lmdeploy.engine.executor import Limits
from lmdeploy.engine.lanes import LaneOptions
from lmdeploy.errors import CapacityError, ConfigError, ModelError
from lmdeploy.models.checkpoint import Checkpoint
from lmdeploy.models.hub import model_name, resolve_model_path
from lmdeploy.models.registry import open_checkpoint
from lmdeploy.models.spec import ModelSpec
from lmdeploy.pytorch.plan import torch_plan
from lmdeploy.runtime.draft import Guesses, opened_draft
from lmdeploy.runtime.engine_choice import (
    Backend,
    Choice,
    Device,
    Offers,
    choose_engine,
    on_the_cpu,
)
from lmdeploy.runtime.gpu import installed_torch
from lmdeploy.runtime.machine import Machine, read_machine
from lmdeploy.runtime.memory_plan import (
    MAX_BODIES,
    TORCH_PROCESS_BYTES,
    MemoryPlan,
    Needs,
    Wishes,
    plan_memory,
    server_bytes,
    size,
)
from lmdeploy.runtime.notes import cautions, native_notes, notes
from lmdeploy.speculative import SpeculativeConfig
from lmdeploy.turbomind import kernel_sets
from lmdeploy.turbomind.accuracy import Accuracy
from lmdeploy.turbomind.layout import model_layout
from lmdeploy.turbomind.plan import native_plan

_SERVER_LINE = f"web server, tokenizer, and {size(MAX_BODIES)} of request bodies at once"
_DRAFT_LINE = "the model that guesses: weights, workspace and as many blocks of its own"
SERVER_QUEUE = 4096  # requests that may wait in a server whose options do not say; one body may hold 2048
_SCALED_ROPE = ("linear", "dynamic", "yarn", "longrope")


@dataclass(frozen=True, slots=True)
class RuntimeConfig:
    """Everything the engine is built from."""

    model: str  # as the user typed it
    model_path: str
    model_format: str | None
    family: str
    vocab_size: int
    model_len: int  # the model's own longest sequence
    max_prefill_token_num: int
    limits: Limits
    kernels: str  # "" where the native engine is not the one
    backend: Backend
    device: Device
    dtype: str  # of matrices, in PyTorch of the cache too; "" in the native engine: as in the files
    accuracy: Accuracy  # of the native engine
    engine: str  # the choice and its reason, for people
    enable_prefix_caching: bool
    lanes: LaneOptions | None
    max_queue: int | None  # requests that may wait beside those that run
    batching_window: float  # seconds
    speculative: SpeculativeConfig | None  # its `model` is a path here
    plan: MemoryPlan
    notes: tuple[str, ...]  # what was decided for the user, one line each
    cautions: tuple[str, ...]  # where that is less than the user may expect

    @property
    def session_len(self) -> int:
        """Longest sequence in tokens, prompt and answer together."""
        return self.plan.session_len

    @property
    def max_batch_size(self) -> int:
        """Most sequences computed at the same time."""
        return self.limits.max_rows


def resolve(
    model: str,
    config: EngineConfig | None = None,
    *,
    speculative: SpeculativeConfig | None = None,
    machine: Machine | None = None,
    offers: Offers | None = None,
    server: bool = False,
    bodies: int = MAX_BODIES,
) -> RuntimeConfig:
    """Make every choice concrete. Raises ConfigError, CapacityError and ModelError.

    config: of an engine's own class takes that engine; EngineConfig or None takes the better fit.
    speculative: how several tokens a step are guessed, if they are to be.
    server: this process becomes a web server, and the engine gets one of its own: the plan holds both, and
    `bodies` bytes of requests that the server holds at once.
    """
    config = config or EngineConfig()
    machine = machine or read_machine()
    offers = offers or Offers(machine.gpus, installed_torch())
    beside = bodies if server else None
    with _opened(model, config, speculative, offers) as (path, checkpoint, guesses, choice):
        try:
            return _resolve(model, path, checkpoint, config, guesses, machine, choice, beside)
        except CapacityError as error:
            # A card that nobody asked for must not be what stands in the way.
            unasked = type(config) is EngineConfig and _native_refusal(checkpoint, config.dtype) is None
            if choice.device == "cpu" or not unasked:
                raise
            choice = on_the_cpu(choice, offers, error.message)
            return _resolve(model, path, checkpoint, config, guesses, machine, choice, beside)


@dataclass(frozen=True, slots=True)
class Footprint:
    """What a model takes before it is known how much there is; `needs` with its longest context."""

    needs: Needs
    vocab_size: int
    device: Device


def footprint(
    model: str,
    config: EngineConfig,
    *,
    speculative: SpeculativeConfig | None = None,
    machine: Machine | None = None,
    offers: Offers | None = None,
) -> Footprint:
    """Raises ConfigError and ModelError, as `resolve` does."""
    machine = machine or read_machine()
    offers = offers or Offers(machine.gpus, installed_torch())
    with _opened(model, config, speculative, offers) as (_, checkpoint, guesses, choice):
        _check_session_len(config.session_len, checkpoint.spec)
        limits = _limits(config, checkpoint.spec, machine)
        needs = _all_needs(checkpoint, guesses.draft, config, limits, choice)
        return Footprint(needs, checkpoint.spec.vocab_size, choice.device)


@contextlib.contextmanager
def _opened(
    model: str, config: EngineConfig, speculative: SpeculativeConfig | None, offers: Offers
) -> Iterator[tuple[Path, Checkpoint, Guesses, Choice]]:
    """The model's place and headers, those of its draft model, and the engine for them."""
    path = resolve_model_path(model, revision=config.revision, download_dir=config.download_dir)
    checkpoint = open_checkpoint(path, config.model_format)
    try:
        refusal, packed = _native_refusal(checkpoint, config.dtype), checkpoint.packed is not None
        choice = choose_engine(config, offers, refusal, packed)
        with opened_draft(speculative, config, path) as guesses:
            yield path, checkpoint, guesses, choice
    finally:
        checkpoint.close()


def _limits(config: EngineConfig, spec: ModelSpec, machine: Machine) -> Limits:
    max_batch_size = config.max_batch_size or DEFAULT_MAX_BATCH_SIZE
    return Limits(
        max_rows=max_batch_size,
        max_step_tokens=config.max_prefill_token_num + max_batch_size,
        max_context=config.session_len or spec.max_position,
        block_size=config.cache_block_seq_len,
        num_threads=config.num_threads or env.NUM_THREADS.number() or machine.cores,
        kv_bits=config.quant_policy or 16,
    )


def _resolve(
    model: str,
    path: Path,
    checkpoint: Checkpoint,
    config: EngineConfig,
    guesses: Guesses,
    machine: Machine,
    choice: Choice,
    bodies: int | None,
) -> RuntimeConfig:
    spec = checkpoint.spec
    _check_session_len(config.session_len, spec)
    limits = _limits(config, spec, machine)
    plan, limits = _plan(checkpoint, guesses.draft, config, limits, machine, choice, bodies)
    kernels = choose_kernels() if choice.backend == "turbomind" else ""
    return RuntimeConfig(
        model=model,
        model_path=str(path),
        model_format=config.model_format,
        family=spec.family,
        vocab_size=spec.vocab_size,
        model_len=spec.max_position,
        max_prefill_token_num=config.max_prefill_token_num,
        limits=limits,
        kernels=kernels,
        backend=choice.backend,
        device=choice.device,
        dtype=_dtype(config, choice),
        accuracy=_accuracy(config),
        engine=choice.line(),
        enable_prefix_caching=config.enable_prefix_caching,
        lanes=_lanes(config),
        max_queue=_max_queue(config, server=bodies is not None),
        batching_window=config.batching_window,
        speculative=guesses.config,
        plan=plan,
        notes=(*checkpoint.notes, *notes(config, plan, spec), *native_notes(kernels, machine)),
        cautions=cautions(config, plan, spec, limits.num_threads, machine, choice),
    )


def _max_queue(config: EngineConfig, server: bool) -> int | None:
    return SERVER_QUEUE if server and config.max_queued_requests is None else config.max_queued_requests


def _lanes(config: EngineConfig) -> LaneOptions | None:
    if not config.long_prompt_threshold:
        return None
    return LaneOptions(
        config.long_prompt_threshold, config.long_prompt_step_share, config.long_prompt_cache_share
    )


def _dtype(config: EngineConfig, choice: Choice) -> str:
    if choice.backend == "pytorch":
        return choice.dtype
    return "" if config.dtype == "auto" else config.dtype


def _accuracy(config: EngineConfig) -> Accuracy:
    return config.accuracy if isinstance(config, TurbomindEngineConfig) else TurbomindEngineConfig().accuracy


def _native_refusal(checkpoint: Checkpoint, dtype: str) -> str | None:
    """Why the native engine cannot compute a model here, from headers alone; None when it can."""
    if dtype not in NATIVE_DTYPES:
        return f"dtype={dtype} is not supported by the native engine (supported: {', '.join(NATIVE_DTYPES)})"
    try:
        kernel_sets()
        layout = model_layout(checkpoint.spec, {name: checkpoint.info(name) for name in checkpoint.names()})
    except ImportError as error:
        return f"the native engine does not load: {error}"
    except ModelError as error:
        return _in_words_of_the_file(error.message, checkpoint)
    for first, *others in layout.ordered_together() if checkpoint.packed is None else ():
        groups = checkpoint.groups(first)
        for other in others:
            if not np.array_equal(groups, checkpoint.groups(other)):
                return _in_words_of_the_file(
                    f"tensors {first!r} and {other!r} list the same inputs in different orders (act-order),"
                    " which the native engine cannot compute together",
                    checkpoint,
                )
    return None


def _in_words_of_the_file(message: str, checkpoint: Checkpoint) -> str:
    """The same with the names that the files have for the tensors in it, and where these are."""
    named = [name for name in checkpoint.names() if repr(name) in message]
    for name in named:
        message = message.replace(repr(name), repr(checkpoint.stored_name(name)))
    return f"{checkpoint.source}: {message}" if named else message


def _plan(
    checkpoint: Checkpoint,
    draft: Checkpoint | None,
    config: EngineConfig,
    limits: Limits,
    machine: Machine,
    choice: Choice,
    bodies: int | None,
) -> tuple[MemoryPlan, Limits]:
    model_len = checkpoint.spec.max_position
    wishes = Wishes(config.session_len, model_len, limits.max_rows, config.cache_max_entry_count)
    free, bound, beside = machine.memory_free, machine.memory_bound, 0
    if choice.device == "cuda" and choice.gpu is not None:
        free, bound = choice.gpu.memory_free, choice.gpu.name
    elif bodies is not None:
        # What this process has taken is part of the server's share, which is planned as a whole.
        free += machine.own_memory
        beside = server_bytes(checkpoint.spec.vocab_size, bodies)
    needs = dataclasses.replace(_all_needs(checkpoint, draft, config, limits, choice), server=beside)
    plan = plan_memory(needs, wishes, free, bound)
    if plan.session_len == limits.max_context:
        return plan, limits
    # The length was found with the workspace of the longest context; the shorter one needs less.
    limits = dataclasses.replace(limits, max_context=plan.session_len)
    wishes = dataclasses.replace(wishes, session_len=plan.session_len)
    needs = dataclasses.replace(_all_needs(checkpoint, draft, config, limits, choice), server=beside)
    return plan_memory(needs, wishes, free, bound), limits


def choose_kernels() -> str:
    """The kernel set that the extension takes: the one in the environment, else the best. ConfigError."""
    sets, name = kernel_sets(), env.KERNELS.text()
    if name is not None and name not in sets:
        raise ConfigError(f"{env.KERNELS.name}={name}: this CPU runs {', '.join(sets)} only")
    return name or sets[-1]


def longest_allowed(spec: ModelSpec) -> int:
    """Longest sequence in tokens that the model's positions allow: rope scaling may go past its own."""
    ropes = {layer.attention.rope for layer in spec.layers}
    limits = [spec.max_position]
    for rope in ropes:
        if rope is not None and rope.kind in _SCALED_ROPE:
            limits.append(int(rope.factor * (rope.original_max_position or spec.max_position)))
    return max(limits)


def _check_session_len(session_len: int | None, spec: ModelSpec) -> None:
    longest = longest_allowed(spec)
    if session_len is not None and session_len > longest:
        raise ConfigError(
            f"session_len={session_len} is longer than the {longest} tokens this model was made for; "
            f"set session_len to at most {longest}",
            param="session_len",
        )


def _all_needs(
    checkpoint: Checkpoint, draft: Checkpoint | None, config: EngineConfig, limits: Limits, choice: Choice
) -> Needs:
    needs = _needs(checkpoint, config, limits, choice)
    if draft is None:
        return needs
    second = _needs(draft, config, limits, choice)
    return dataclasses.replace(needs, draft=second.weights + second.workspace, draft_block=second.block)


def _needs(checkpoint: Checkpoint, config: EngineConfig, limits: Limits, choice: Choice) -> Needs:
    if choice.backend == "pytorch":
        torch = torch_plan(checkpoint.spec, choice.dtype, choice.device, limits.block_size, limits.kv_bits)
        token = torch.block // limits.block_size
        process = TORCH_PROCESS_BYTES[choice.device]
        return Needs(torch.weights, torch.workspace, torch.block, limits.block_size, token, process)
    infos = {name: checkpoint.info(name) for name in checkpoint.names()}
    native = native_plan(checkpoint.spec, infos, limits, _accuracy(config), config.dtype)
    return Needs(
        weights=native.weights,
        workspace=native.workspace,
        block=native.block,
        block_size=limits.block_size,
        token=native.block // limits.block_size,
    )


def _kv_bits(limits: Limits) -> str:
    return "" if limits.kv_bits == 16 else f", {limits.kv_bits} bits a value and scales"


def plan_table(config: RuntimeConfig) -> str:
    """The start-up account for people, one fact a line."""
    plan = config.plan
    at_once = f"{plan.sequences} sequence{'' if plan.sequences == 1 else 's'} of {plan.session_len} tokens"
    bound = plan.free_bound
    where = "" if bound == "machine" else f", limited by {bound}" if bound.startswith("/") else f" on {bound}"
    kernels = f", with the {config.kernels} kernels" if config.kernels else ""
    rows = [
        ("weights", size(plan.weights), ""),
        ("KV cache", size(plan.kv_pool), f"{plan.num_blocks} blocks of {plan.block_size} tokens"),
        ("workspace", size(plan.workspace), f"prompts in chunks of {config.max_prefill_token_num} tokens"),
        *([("draft", size(plan.draft), _DRAFT_LINE)] if plan.draft else []),
        ("process", size(plan.process), ""),
        *([("server", size(plan.server), _SERVER_LINE)] if plan.server else []),
        ("in all", size(plan.total), f"of {size(plan.free)} free{where}"),
    ]
    return "\n".join(
        [
            f"model      {model_name(config.model_path)} ({config.family})",
            f"engine     {config.engine}",
            *(f"{name:<10} {value:>9}  {more}".rstrip() for name, value, more in rows),
            f"a token    {size(plan.kv_per_token)} of KV cache{_kv_bits(config.limits)}",
            f"at once    {at_once}, limited by {plan.bound}",
            f"threads    {config.limits.num_threads}{kernels}",
            *([f"speculation {config.speculative.line()}"] if config.speculative else []),
            *config.notes,
            *config.cautions,
        ]
    )
