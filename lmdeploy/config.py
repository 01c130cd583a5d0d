"""The options users know, as frozen dataclasses: engine, generation, chat template.

The declaration of a field is everything there is to know about it: default, help (also the command-line
help), accepted values, range. A field that this version cannot act on is declared with `_fixed`: its neutral
value is accepted, any other is refused with the reason given there. Knows no model, no machine and no
tokenizer: what depends on those is decided by `runtime.resolve` and `runtime.generate`.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from lmdeploy.errors import ConfigError, RequestError, shorten
from lmdeploy.field_checks import MOST, check_fields

DEFAULT_MAX_BATCH_SIZE = 32
NATIVE_DTYPES = ("auto", "bfloat16", "float16")
MAX_SEED = 2**64 - 1

# What sampling uses where neither the caller nor the model says anything.
DEFAULT_TEMPERATURE, DEFAULT_TOP_P, DEFAULT_TOP_K, DEFAULT_MIN_P = 0.8, 1.0, 50, 0.0

_ONE_MACHINE = "this version runs one engine on one machine"
_GPU = "it concerns GPUs only"
_PREFIX = "the prefix cache keeps every full block; enable_prefix_caching=False turns it off"
_SCHEDULE = "steps are planned from max_prefill_token_num alone"
_STATE_SPACE = "it concerns state-space models only"
_EXPERTS = "it concerns mixture-of-experts models only"
_DIFFUSION = "it concerns diffusion language models only"
_EAGER = "no step is captured as a CUDA graph"
_BLOCKS = "their number follows from cache_max_entry_count"


def _field(default: Any, help: str, **rules: Any) -> Any:
    """A field that works. Rules: kind (type of values), low, high, open_low, open_high, choices, hint (what
    to do instead of another choice), optional, path (a text that names a file, so any bytes), flag (its
    command-line flag where that is not its name)."""
    return dataclasses.field(default=default, metadata={"help": help, **rules})


def _fixed(default: Any, reason: str, *also: Any) -> Any:
    """A field accepted at its neutral value (or in `also`, which means the same here), refused otherwise."""
    rules = {"help": f"only {default!r}: {reason}", "neutral": (default, *also), "reason": reason}
    return dataclasses.field(default=default, metadata=rules)


def is_fixed(field: dataclasses.Field[Any]) -> bool:
    """True when only the neutral value of the field is accepted; such a field gets no command-line flag."""
    return "neutral" in field.metadata


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Options that every engine has; given as it is, it leaves the choice of the engine to the start.

    None means: decided at start from model and machine, and printed there. Raises ConfigError, naming field,
    value and reason.
    """

    dtype: str = _field(
        "auto",
        "type of unquantised matrices; auto: the engine's own; float32 is a type of the PyTorch engine",
        choices=("auto", "bfloat16", "float16", "float32"),
    )
    model_format: str | None = _field(
        None,
        "layout of the weight files; found from the files when not given",
        choices=("hf", "gguf", "awq", "gptq", "compressed-tensors", "fp8", "smooth_quant", "mxfp4"),
    )
    session_len: int | None = _field(
        None,
        "longest sequence in tokens, prompt and answer; default: what fits, up to the model's own",
        kind=int,
        low=1,
    )
    max_batch_size: int | None = _field(
        None,
        f"most sequences computed at the same time; default {DEFAULT_MAX_BATCH_SIZE}",
        kind=int,
        low=1,
        high=4096,
    )
    cache_max_entry_count: float = _field(
        0.8,
        "share of the memory free after weights and workspace that the key/value cache may take",
        kind=float,
        low=0.0,
        high=1.0,
        open_low=True,
        open_high=True,
    )
    cache_block_seq_len: int = _field(64, "tokens one cache block holds", choices=(16, 32, 64, 128))
    quant_policy: int | None = _field(
        0,
        "bits of a key or value in the cache: 8 or 4; 0: not quantised, 16 bits",
        choices=(0, 8, 4),
        optional=True,
    )
    enable_prefix_caching: bool = _field(True, "reuse cached blocks of equal prompt beginnings", kind=bool)
    # 512 rows already keep the matrix units busy; more would only grow the workspace. Beside running streams
    # a step takes fewer, by what steps cost on this machine (engine/step_cost.py).
    max_prefill_token_num: int = _field(
        512,
        "most prompt tokens one step computes: longer prompts are cut into chunks",
        kind=int,
        low=1,
        high=65536,
    )
    long_prompt_threshold: int = _field(
        0,
        "prompts of more tokens are long: they share a bounded part of each step and of the cache, so that "
        "short ones need not wait for them; 0: all prompts are alike",
        kind=int,
        low=0,
        high=MOST,
    )
    # Measured by benchmarks/lanes.py: a quarter of a step is what a short prompt hardly notices.
    long_prompt_step_share: float = _field(
        0.25,
        "share of what prompts may add to a step that is for long ones",
        kind=float,
        low=0.0,
        high=1.0,
        open_low=True,
        open_high=True,
    )
    long_prompt_cache_share: float = _field(
        0.5,
        "share of rows and cache blocks for long prompts; one that needs more is the only long one meanwhile",
        kind=float,
        low=0.0,
        high=1.0,
        open_low=True,
    )
    max_queued_requests: int | None = _field(
        None,
        "requests that may wait beside the max_batch_size that run; more are refused; default: any number, "
        "and 4096 in a server",
        kind=int,
        low=0,
        high=MOST,
    )
    batching_window: float = _field(
        0.0,
        "seconds a server's idle engine waits after a request for others to compute together with it",
        kind=float,
        low=0.0,
        high=1.0,
    )
    num_threads: int | None = _field(
        None, "compute threads; default: the physical cores this process may use", kind=int, low=1, high=1024
    )
    revision: str | None = _field(None, "branch, tag or commit of a model on the hub", kind=str)
    download_dir: str | None = _field(None, "folder for downloaded models", kind=str, path=True)

    tp: int = _fixed(1, _ONE_MACHINE)
    dp: int = _fixed(1, _ONE_MACHINE)
    ep: int = _fixed(1, _ONE_MACHINE)
    attn_tp_size: int | None = _fixed(None, _ONE_MACHINE, 1)
    mlp_tp_size: int | None = _fixed(None, _ONE_MACHINE, 1)
    hf_overrides: Mapping[str, Any] | None = _fixed(None, "edit config.json in the model directory", {})
    empty_init: bool = _fixed(False, "weights are always read from the model")
    language_model_only: bool = _fixed(False, "only the language model is read", True)
    enable_metrics: bool = _fixed(True, "a server's --disable-metrics turns them off", False)

    def __post_init__(self) -> None:
        check_fields(self, ConfigError)


@dataclass(frozen=True, slots=True)
class TurbomindEngineConfig(EngineConfig):
    """Options of the native engine, which computes on the CPU.

    None means: decided at start from model and machine, and printed there. Raises ConfigError, naming field,
    value and reason.
    """

    dtype: str = _field(
        "auto",
        "type of unquantised matrices; auto: float16 stays float16, all else becomes bfloat16, which is "
        "twice as fast for prompts on CPUs with AVX512_BF16",
        choices=NATIVE_DTYPES,
        hint="the PyTorch engine has other types (PytorchEngineConfig, --backend pytorch)",
    )
    accuracy: Literal["exact", "auto", "fast"] = _field(
        "auto",
        "rounding of activations that meet quantised weights; exact: 15 bits, fast: 8, auto: 15 where a "
        "group of values has an outlier, else 8",
        choices=("exact", "auto", "fast"),
    )

    cp: int = _fixed(1, _ONE_MACHINE)
    device_num: int | None = _fixed(None, _GPU, 1)
    attn_cp_size: int | None = _fixed(None, _ONE_MACHINE, 1)
    attn_dp_size: int | None = _fixed(None, _ONE_MACHINE, 1)
    mlp_dp_size: int | None = _fixed(None, _ONE_MACHINE, 1)
    outer_dp_size: int | None = _fixed(None, _ONE_MACHINE, 1)
    nnodes: int = _fixed(1, _ONE_MACHINE)
    node_rank: int = _fixed(0, _ONE_MACHINE)
    dist_init_addr: str | None = _fixed(None, _ONE_MACHINE)
    devices: Sequence[int] | None = _fixed(None, _GPU)
    communicator: str = _fixed("nccl", _GPU)
    rope_scaling_factor: float = _fixed(0.0, "the model's own rope_scaling is used", 1.0)
    use_logn_attn: bool = _fixed(False, "no supported model is trained with it")
    cache_chunk_size: int = _fixed(-1, "the whole cache is allocated at start", 0)
    cache_checkpoint_interval: int = _fixed(4096, _STATE_SPACE)
    cache_prompt: str = _fixed("auto", _PREFIX, "all")
    cache_prompt_boundary_skip: int = _fixed(1, _PREFIX)
    cache_generation: str = _fixed("auto", _PREFIX, "all")
    num_tokens_per_iter: int = _fixed(0, _SCHEDULE)
    max_prefill_iters: int = _fixed(1, _SCHEDULE)
    async_: int = _fixed(1, "steps run one after the other", 0)


@dataclass(frozen=True, slots=True)
class PytorchEngineConfig(EngineConfig):
    """Options of the PyTorch engine, which computes on a CUDA card or the CPU; `pip install lmdeploy[torch]`.

    None means: decided at start from model and machine, and printed there. Raises ConfigError, naming field,
    value and reason.
    """

    dtype: str = _field(
        "auto",
        "type of matrices and cache; auto: bfloat16 on a card, float32 on the CPU",
        choices=("auto", "bfloat16", "float16", "float32"),
    )
    device_type: str = _field(
        "auto",
        "where the PyTorch engine computes; auto: on a CUDA card that torch can use, else on the CPU",
        choices=("auto", "cuda", "cpu"),
        flag="--device",
    )

    dp_rank: int = _fixed(0, _ONE_MACHINE)
    moe_tp_size: int | None = _fixed(None, _ONE_MACHINE, 1)
    prefill_interval: int = _fixed(16, _SCHEDULE)
    block_size: int = _fixed(64, "the size of a cache block is cache_block_seq_len")
    kernel_block_size: int = _fixed(-1, "the size of a cache block is cache_block_seq_len")
    num_cpu_blocks: int = _fixed(0, _BLOCKS)
    num_gpu_blocks: int = _fixed(0, _BLOCKS)
    adapters: Mapping[str, str] | None = _fixed(None, "adapters are not supported", {})
    cudagraph_capture_batch_sizes: Sequence[int] | None = _fixed(None, _EAGER)
    eager_mode: bool = _fixed(False, _EAGER, True)
    thread_safe: bool = _fixed(False, "a pipeline may be used from any thread", True)
    prefix_cache_state_budget: int = _fixed(0, _STATE_SPACE)
    prefix_cache_decode_state_interval: int = _fixed(0, _STATE_SPACE)
    custom_module_map: Mapping[str, str] | None = _fixed(None, "code of a model is never run", {})
    distributed_executor_backend: str | None = _fixed(None, _ONE_MACHINE, "uni")
    enable_microbatch: bool = _fixed(False, _EXPERTS)
    enable_eplb: bool = _fixed(False, _EXPERTS)
    enable_return_routed_experts: bool = _fixed(False, _EXPERTS)
    enable_mp_engine: bool = _fixed(False, "the server always runs the engine in its own process")
    mp_engine_backend: str = _fixed("mp", "the server always runs the engine in its own process")
    enable_transfer_obj_ref: bool = _fixed(False, _ONE_MACHINE)
    logprobs_mode: str | None = _fixed(
        None, "log-probabilities are those of the raw logits and need no mode", "raw_logprobs"
    )
    dllm_block_length: int | None = _fixed(None, _DIFFUSION)
    dllm_unmasking_strategy: str = _fixed("low_confidence_dynamic", _DIFFUSION)
    dllm_denoising_steps: int | None = _fixed(None, _DIFFUSION)
    dllm_confidence_threshold: float = _fixed(0.85, _DIFFUSION)
    role: str = _fixed("Hybrid", _ONE_MACHINE)
    migration_backend: str = _fixed("DLSlime", _ONE_MACHINE)


@dataclass(frozen=True, slots=True)
class GenerationConfig:
    """How to generate. Sampling fields are None while the caller has not set them.

    Raises RequestError with `param` = name of the field. What needs a tokenizer or the engine's limits (ids
    inside the vocabulary, banned words) is checked when a request is built.
    """

    n: int = _fixed(1, "send the prompt several times, each with its own random_seed")
    max_new_tokens: int | None = _field(
        512, "most tokens to generate; None: as many as fit", kind=int, low=1, high=MOST, optional=True
    )
    do_sample: bool | None = _field(
        None,
        "True: sample, False: greedy, None: sample if temperature, top_p, top_k or min_p is set",
        kind=bool,
    )
    temperature: float | None = _field(
        None, "divides the logits; 0 takes the most likely token", kind=float, low=0.0, high=2.0
    )
    top_p: float | None = _field(
        None, "keep the most likely tokens up to this probability mass", kind=float, low=0.0, high=1.0
    )
    top_k: int | None = _field(None, "keep the k most likely tokens; 0: all", kind=int, low=0, high=2**31 - 1)
    min_p: float | None = _field(
        None,
        "drop tokens less likely than this share of the most likely one",
        kind=float,
        low=0.0,
        high=1.0,
    )
    repetition_penalty: float | None = _field(
        None,
        "divides the logits of tokens seen in prompt or answer; 1: off, the default unless the model sets it",
        kind=float,
        low=0.01,
        high=100.0,
    )
    presence_penalty: float = _field(
        0.0, "subtracted once from tokens of the answer", kind=float, low=-2.0, high=2.0
    )
    frequency_penalty: float = _field(
        0.0, "subtracted per occurrence from tokens of the answer", kind=float, low=-2.0, high=2.0
    )
    logit_bias: Mapping[int, float] | None = _field(None, "token id -> value added to its logit", kind="bias")
    random_seed: int | None = _field(
        None, "seed of the draw; equal seeds give equal answers", kind=int, low=-(2**63), high=MAX_SEED
    )
    min_new_tokens: int | None = _field(
        None, "end-of-answer ids are banned until then", kind=int, low=0, high=MOST
    )
    ignore_eos: bool = _field(False, "do not stop at the model's end-of-answer ids", kind=bool)
    stop_words: Sequence[str] | None = _field(None, "texts that end the answer", kind="words")
    bad_words: Sequence[str] | None = _field(None, "words never generated, one token each", kind="words")
    stop_token_ids: Sequence[int] | None = _field(None, "token ids that end the answer", kind="ids")
    bad_token_ids: Sequence[int] | None = _field(None, "token ids never generated", kind="ids")
    allowed_token_ids: Sequence[int] | None = _field(
        None, "the only token ids that may be generated", kind="ids"
    )
    repetition_ngram_size: int = _field(
        0, "end the answer when its last n tokens have come too often; 0: off", kind=int, low=0, high=1024
    )
    repetition_ngram_threshold: int = _field(
        0, "how often, within the last 1024 tokens of the answer; 0: off", kind=int, low=0, high=1024
    )
    include_stop_str_in_output: bool = _field(False, "keep the matched stop word in the text", kind=bool)
    skip_special_tokens: bool = _field(True, "leave control tokens out of the text", kind=bool)
    logprobs: int | None = _field(
        None, "log-probability of each token and of the k most likely ones", kind=int, low=0, high=1024
    )
    output_logits: Literal["generation"] | None = _field(
        None, "'generation': return the raw logits of each generated token", choices=("generation",)
    )

    spaces_between_special_tokens: bool = _fixed(
        True, "tokenizers of another kind than the ones used here add spaces", False
    )
    output_last_hidden_state: str | None = _fixed(None, "hidden states are not kept")
    response_format: Mapping[str, Any] | None = _field(
        None,
        "what the answer must be: type text, json_object, json_schema, regex_schema or grammar, as in HTTP "
        "requests",
        kind=Mapping,
    )
    logits_processors: Sequence[Any] | None = _fixed(
        None, "logits never leave the engine; use logit_bias", [], ()
    )
    return_ppl: bool = _fixed(False, "use pipeline.get_ppl")
    with_cache: bool = _fixed(False, _ONE_MACHINE)
    preserve_cache: bool = _fixed(False, _ONE_MACHINE)
    migration_request: object = _fixed(None, _ONE_MACHINE)
    return_routed_experts: bool = _fixed(False, "it concerns mixture-of-experts training only")

    def __post_init__(self) -> None:
        check_fields(self, RequestError)
        if self.min_new_tokens and self.max_new_tokens and self.min_new_tokens > self.max_new_tokens:
            raise RequestError(
                f"min_new_tokens={self.min_new_tokens} is larger than max_new_tokens={self.max_new_tokens}",
                param="min_new_tokens",
            )

    @property
    def samples(self) -> bool:
        """Whether tokens are drawn (True) or the most likely one is taken (False)."""
        if self.do_sample is not None:
            return self.do_sample
        return any(x is not None for x in (self.temperature, self.top_p, self.top_k, self.min_p))


@dataclass(frozen=True, slots=True)
class ChatTemplateConfig:
    """A chat template given by its parts, which are texts, or by name. The model's own is used when none is
    given."""

    model_name: str | None = _field(
        None, "name of a built-in format (hf: the model's own); others are answered with the list", kind=str
    )
    model_path: str | None = _fixed(None, "give that model's template file instead")
    system: str | None = _field(None, "text before the system message", kind=str)
    meta_instruction: str | None = _field(None, "system message when the caller sends none", kind=str)
    eosys: str | None = _field(None, "text after the system message", kind=str)
    user: str | None = _field(None, "text before a user message", kind=str)
    eoh: str | None = _field(None, "text after a user message", kind=str)
    assistant: str | None = _field(None, "text before an answer", kind=str)
    eoa: str | None = _field(None, "text after an answer", kind=str)
    tool: str | None = _field(None, "text before a tool result", kind=str)
    eotool: str | None = _field(None, "text after a tool result", kind=str)
    separator: str | None = _field(None, "text between turns", kind=str)
    capability: Literal["chat"] | None = _fixed(None, "do_preprocess=False takes plain texts", "chat")
    stop_words: Sequence[str] | None = _field(None, "texts that end an answer", kind="words")

    def __post_init__(self) -> None:
        check_fields(self, ConfigError)

    def to_json(self, file_path: str | Path | None = None) -> str:
        """The set fields as a JSON text, also written to `file_path` when given."""
        fields = {k: v for k, v in dataclasses.asdict(self).items() if v is not None}
        text = json.dumps(fields, ensure_ascii=False, indent=2)
        if file_path is not None:
            target = Path(file_path)
            partial = target.with_name(target.name + ".partial")
            partial.write_text(text + "\n", encoding="utf-8")
            partial.replace(target)
        return text

    @classmethod
    def from_json(cls, file_or_string: str | Path) -> ChatTemplateConfig:
        """Read a JSON file, or a JSON text when no such file exists. Raises ConfigError."""
        source, text = _json_source(file_or_string)
        try:
            values = json.loads(text)
        except json.JSONDecodeError as error:
            raise ConfigError(f"chat template {source} is not JSON: {error}") from None
        if not isinstance(values, dict):
            raise ConfigError(f"chat template {source} must be a JSON object of its fields")
        unknown = sorted(set(values) - {f.name for f in dataclasses.fields(cls)})
        if unknown:
            raise ConfigError(f"chat template {source} has unknown fields: {', '.join(unknown)}")
        return cls(**values)


def _json_source(file_or_string: str | Path) -> tuple[str, str]:
    text = str(file_or_string)
    if text.lstrip().startswith("{"):
        return "text", text
    try:
        return f"file {text}", Path(text).read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"chat template file {shorten(text)} cannot be read: {reason}") from None
