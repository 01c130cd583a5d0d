"""The offline API with the demo model and the native engine. Greedy text against transformers is tested in
numerics; here: that what a caller asks for is what happens."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import quantised_hf as q
import torch
from demo_model import demo_gguf, reference_model
from responses import assert_idle, many, one
from tiny_model import write_tiny_model

from lmdeploy import GenerationConfig, Pipeline, Response, TurbomindEngineConfig, pipeline

SESSION_LEN = 512
QUESTION = "Write one sentence about the sea."

# As introductions to LMDeploy print it, but for the path.
SNIPPET = """
from lmdeploy import pipeline, TurbomindEngineConfig, GenerationConfig

engine_cfg = TurbomindEngineConfig(
    model_format="awq",          # 量化权重格式，fp16 模型留空
    tp=1,                        # 张量并行卡数
    session_len=8192,            # 单会话最大长度
    max_batch_size=64,           # 最大并发批
    cache_max_entry_count=0.8,   # KV Cache 占空闲显存比例
)

pipe = pipeline({model!r}, backend_config=engine_cfg)

gen_cfg = GenerationConfig(
    temperature=0.7,
    top_p=0.8,
    max_new_tokens=512,
)

resp = pipe(["介绍一下你自己", "用三句话解释什么是注意力机制"], gen_config=gen_cfg)
for r in resp:
    print(r.text)
"""


@pytest.fixture(scope="module")
def pipe() -> Iterator[Pipeline]:
    config = TurbomindEngineConfig(session_len=SESSION_LEN, max_batch_size=8)
    with pipeline(str(demo_gguf()), backend_config=config) as made:
        yield made


def write_awq_model(path: Path) -> Path:
    """A tiny random Llama with AWQ weights from independent packing code, and the smoke model's tokenizer."""

    def quantise(name: str, n: int, k: int, seed: int) -> tuple[q.Parts, q.Array]:
        matrix = q.random_matrix(n, k, 128, seed=seed)
        return q.pack_awq(*matrix), q.weights(*matrix)

    described = json.loads((write_tiny_model(path) / "config.json").read_text())
    awq = {"quant_method": "awq", "version": "gemm", "bits": 4, "group_size": 128, "zero_point": True}
    tokens = {key: value for key, value in described.items() if key.endswith("token_id")}
    vocab = described["vocab_size"]
    model = q.llama(quantise, vocab)
    return model.write(path, awq, vocab_size=vocab, max_position_embeddings=8192, **tokens)


@pytest.mark.parametrize("weights", ["awq", "gguf"])
def test_code_of_the_seed_runs_as_printed(weights: str, tmp_path: Path) -> None:
    code = SNIPPET
    if weights == "gguf":
        code = "".join(line for line in code.splitlines(True) if "model_format" not in line)
    path = write_awq_model(tmp_path / "awq_model") if weights == "awq" else demo_gguf()
    code = code.format(model=str(path))
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert weights == "awq" or len(done.stdout.strip()) > 20  # random weights may say anything


def test_answer_and_its_end(pipe: Pipeline) -> None:
    """The end-of-turn marker stops the answer and is not in the text."""
    response = one(pipe("What is the capital of France?", GenerationConfig(max_new_tokens=64)))
    assert "Paris" in response.text
    assert response.finish_reason == "stop"
    assert "<|" not in response.text
    assert response.generate_token_len == len(response.token_ids) + 1
    assert pipe.frontend.tokenizer.decode(response.token_ids) == response.text
    assert_idle(pipe)


@pytest.mark.parametrize("fields", [{}, {"temperature": 0.8, "random_seed": 5}, {"logprobs": 2}])
def test_stream_is_the_whole_answer(pipe: Pipeline, fields: dict[str, Any]) -> None:
    config = GenerationConfig(max_new_tokens=24, **fields)
    whole = one(pipe(QUESTION, config))
    joined = Response()
    for piece in pipe.stream_infer(QUESTION, gen_config=config):
        joined.extend(piece)
    assert (joined.text, joined.token_ids, joined.finish_reason, joined.generate_token_len) == (
        whole.text,
        whole.token_ids,
        whole.finish_reason,
        whole.generate_token_len,
    )
    assert joined.logprobs == whole.logprobs


def test_stop_string_across_tokens(pipe: Pipeline) -> None:
    text = one(pipe(QUESTION, GenerationConfig(max_new_tokens=32))).text
    config = GenerationConfig(max_new_tokens=32, stop_words=[text[10:24]])
    whole = one(pipe(QUESTION, config))
    pieces = list(pipe.stream_infer(QUESTION, gen_config=config))
    assert whole.text == "".join(p.text for p in pieces) == text[:10]
    assert whole.finish_reason == pieces[-1].finish_reason == "stop"
    assert_idle(pipe)


def test_answer_is_cut_to_the_room_and_long_prompts_are_refused(pipe: Pipeline) -> None:
    prompts = ["sea " * 400, "Say yes.", "sea " * 600, "Say no."]
    configs = [GenerationConfig(max_new_tokens=n, ignore_eos=True) for n in (4096, 4, 4, 4)]
    responses = many(pipe(prompts, configs))
    assert [r.finish_reason for r in responses] == ["length", "length", "error", "length"]
    assert responses[0].input_token_len + responses[0].generate_token_len == SESSION_LEN
    assert responses[2].error_code == "context_length_exceeded"
    assert [bool(r.text) for r in responses] == [True, True, False, True]
    assert one(pipe(prompts[1], configs[1])).token_ids == responses[1].token_ids


def test_seeded_request_does_not_depend_on_its_neighbours(pipe: Pipeline) -> None:
    seeded = GenerationConfig(temperature=0.8, random_seed=42, max_new_tokens=16, ignore_eos=True)
    free = GenerationConfig(temperature=1.0, max_new_tokens=16, ignore_eos=True)
    alone = one(pipe(QUESTION, seeded)).token_ids
    neighbours = [f"Tell me about the number {i}." for i in range(7)]
    for _ in range(2):
        beside = many(pipe([QUESTION, *neighbours], [seeded, *[free] * 7]))
        assert beside[0].token_ids == alone
    other = GenerationConfig(temperature=0.8, random_seed=43, max_new_tokens=16, ignore_eos=True)
    assert one(pipe(QUESTION, other)).token_ids != alone


def test_log_probabilities_are_those_of_the_raw_logits(pipe: Pipeline) -> None:
    """Penalties, bias and temperature change what is drawn, not what is reported."""
    config = GenerationConfig(
        max_new_tokens=6,
        temperature=0.7,
        random_seed=1,
        repetition_penalty=1.3,
        logprobs=5,
        output_logits="generation",
        logit_bias={11: 5.0},
    )
    response = one(pipe(QUESTION, config))
    assert response.logits is not None and response.logprobs is not None
    assert response.logits.shape == (len(response.token_ids), pipe.frontend.vocab_size)
    logits = response.logits.astype(np.float64)
    expected = logits - np.log(np.exp(logits - logits.max(1, keepdims=True)).sum(1, keepdims=True))
    expected -= logits.max(1, keepdims=True)
    for row, token, values in zip(expected, response.token_ids, response.logprobs, strict=True):
        assert set(values) == {token, *np.argsort(-row)[:5].tolist()}
        for i, value in values.items():
            assert value == pytest.approx(row[i], abs=1e-4)


def test_bans_and_forced_tokens(pipe: Pipeline) -> None:
    forced = pipe.frontend.tokenizer.encode(" sea")[0]
    response = one(pipe(QUESTION, GenerationConfig(max_new_tokens=3, logit_bias={forced: 100})))
    assert response.token_ids == [forced] * 3
    banned = GenerationConfig(max_new_tokens=24, bad_words=["sea", "ocean"], ignore_eos=True)
    text = one(pipe(QUESTION, banned)).text
    assert "sea" not in text.split() and "ocean" not in text.split()


def test_min_new_tokens(pipe: Pipeline) -> None:
    short = one(pipe("Say yes.", GenerationConfig(max_new_tokens=200)))
    assert short.finish_reason == "stop"
    least = short.generate_token_len + 10
    longer = one(pipe("Say yes.", GenerationConfig(max_new_tokens=200, min_new_tokens=least)))
    assert longer.generate_token_len > least


def test_perplexity_is_that_of_the_reference(pipe: Pipeline) -> None:
    """transformers in float32 on the dequantised weights: over this short text the roundings of accuracy=auto
    shift the mean log-likelihood by less than 3 % of a nat a token."""
    text = "In the beginning God created the heaven and the earth. And the earth was without form, and void;"
    ids = pipe.frontend.tokenizer.encode(text)
    with torch.no_grad():
        logits = reference_model()(torch.tensor([ids])).logits[0].double()
    scores = logits.log_softmax(-1)[:-1].gather(1, torch.tensor(ids[1:])[:, None])
    first = pipe.get_ppl(ids)
    assert first == pytest.approx(-scores.mean().item(), abs=0.03)
    assert pipe.get_ppl([ids, ids]) == [first, first]


def test_leaving_a_stream_frees_the_cache(pipe: Pipeline) -> None:
    config = GenerationConfig(max_new_tokens=300, ignore_eos=True)
    for _ in range(5):
        stream = pipe.stream_infer([QUESTION, "Hello."], gen_config=config)
        next(stream)
        assert pipe.stats().blocks_held > 0
        del stream
        assert_idle(pipe)


def test_conversation_sees_its_history(pipe: Pipeline) -> None:
    with pipe.session() as session:
        config = GenerationConfig(max_new_tokens=24)
        pipe.chat("My name is Ada. What is 1 + 1?", session, config)
        pipe.chat("Thank you.", session, config)
        assert len(session.history) == 2
        assert session.response is not None
        assert session.response.input_token_len > len(pipe.frontend.chat_ids(session.messages("")[:2]))


def test_threads_get_their_own_answers(pipe: Pipeline) -> None:
    config = GenerationConfig(max_new_tokens=8, ignore_eos=True)
    prompts = [f"Count to {n}." for n in range(4)]
    alone = [one(pipe(p, config)).token_ids for p in prompts]
    got: list[list[int]] = [[] for _ in prompts]

    def ask(index: int) -> None:
        got[index] = one(pipe(prompts[index], config)).token_ids

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert got == alone


def test_a_caution_is_logged_and_the_plan_only_when_asked(caplog: pytest.LogCaptureFixture) -> None:
    many = TurbomindEngineConfig(
        session_len=64, max_batch_size=1, num_threads=len(os.sched_getaffinity(0)) + 1
    )
    with pipeline(str(demo_gguf()), backend_config=many):
        assert [r.message for r in caplog.records if "fewer would be faster" in r.message]
        assert not [r for r in caplog.records if "KV cache" in r.message]
    with pipeline(str(demo_gguf()), backend_config=many, log_level="INFO"):
        assert [r for r in caplog.records if "KV cache" in r.message]
