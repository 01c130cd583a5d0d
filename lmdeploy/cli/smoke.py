"""A tiny random model, written on the spot and run through the native engine: does this installation work?

Needs no download. Owns the model's files; loading and generating go the way of every other model.
"""

from __future__ import annotations

import json
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lmdeploy.config import GenerationConfig, TurbomindEngineConfig
from lmdeploy.errors import EngineError

if TYPE_CHECKING:
    from lmdeploy.pipeline import Pipeline

HIDDEN, LAYERS, HEADS, KV_HEADS, HEAD_DIM, FFN = 128, 2, 4, 2, 32, 256
VOCAB = 258  # every byte, then <s> and </s>
NEW_TOKENS = 16
PROMPT = "Every byte of this text is one token: é 漢 \U0001f600."


def write_model(directory: Path, seed: int = 0) -> None:
    """A Llama of random float32 weights with a byte-level tokenizer, as a Hugging Face directory."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "intermediate_size": FFN,
        "vocab_size": VOCAB,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "bos_token_id": VOCAB - 2,
        "eos_token_id": VOCAB - 1,
        "dtype": "float32",
    }
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "tokenizer.json").write_text(json.dumps(_tokenizer()))
    special = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
    (directory / "tokenizer_config.json").write_text(json.dumps(special))
    _write_weights(directory / "model.safetensors", seed)


def run() -> str:
    """Load such a model, generate twice; one line that says how it went. Raises LMDeployError."""
    with tempfile.TemporaryDirectory(prefix="lmdeploy-smoke-") as name:
        directory = Path(name)
        write_model(directory)
        begin = time.perf_counter()
        first, second = _generate(directory)
        seconds = time.perf_counter() - begin
    if len(first) != NEW_TOKENS or first != second:
        raise EngineError(f"the smoke test generated {first} and then {second}: they must be equal")
    return f"a random model was loaded and generated {2 * NEW_TOKENS} tokens in {seconds:.2f} s"


def _generate(directory: Path) -> tuple[list[int], list[int]]:
    """Ids of the answer to one text, twice: the second time its prompt comes from the prefix cache."""
    from lmdeploy.pipeline import pipeline

    engine = TurbomindEngineConfig(session_len=128, max_batch_size=2, cache_block_seq_len=16)
    greedy = GenerationConfig(max_new_tokens=NEW_TOKENS, ignore_eos=True)
    with pipeline(str(directory), backend_config=engine) as pipe:
        return _answer(pipe, greedy), _answer(pipe, greedy)


def _answer(pipe: Pipeline, config: GenerationConfig) -> list[int]:
    from lmdeploy.messages import Response

    answer = Response()
    for piece in pipe.stream_infer(PROMPT, gen_config=config):
        answer.extend(piece)
    if answer.error_message is not None:
        raise EngineError(f"the smoke test failed: {answer.error_message}")
    return answer.token_ids


def _write_weights(path: Path, seed: int) -> None:
    import numpy as np
    from safetensors.numpy import save_file

    random = np.random.default_rng(seed)

    def matrix(rows: int, columns: int) -> Any:
        return (random.standard_normal((rows, columns)) / columns**0.5).astype(np.float32)

    ones = np.ones(HIDDEN, np.float32)
    tensors = {
        "model.embed_tokens.weight": matrix(VOCAB, HIDDEN),
        "model.norm.weight": ones,
        "lm_head.weight": matrix(VOCAB, HIDDEN),
    }
    queries, keys = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    shapes = {
        "self_attn.q_proj": (queries, HIDDEN),
        "self_attn.k_proj": (keys, HIDDEN),
        "self_attn.v_proj": (keys, HIDDEN),
        "self_attn.o_proj": (HIDDEN, queries),
        "mlp.gate_proj": (FFN, HIDDEN),
        "mlp.up_proj": (FFN, HIDDEN),
        "mlp.down_proj": (HIDDEN, FFN),
    }
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}"
        tensors.update({f"{prefix}.{name}.weight": matrix(*shape) for name, shape in shapes.items()})
        tensors[f"{prefix}.input_layernorm.weight"] = ones
        tensors[f"{prefix}.post_attention_layernorm.weight"] = ones
    save_file(tensors, path, metadata={"format": "pt"})


def _tokenizer() -> dict[str, Any]:
    vocab = {character: byte for byte, character in enumerate(_byte_characters())}
    special = {"<s>": VOCAB - 2, "</s>": VOCAB - 1}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    return {
        "version": "1.0",
        "added_tokens": [{"id": i, "content": text, **flags} for text, i in special.items()],
        "pre_tokenizer": byte_level,
        "decoder": byte_level,
        "model": {"type": "BPE", "vocab": {**vocab, **special}, "merges": []},
    }


def _byte_characters() -> list[str]:
    """The printable character that stands for each byte in byte-level vocabularies (GPT-2's table)."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(256, 512))
    return [chr(b) if b in printable else chr(next(others)) for b in range(256)]
