"""Real vocabularies: ids and text against what sentencepiece, tiktoken and llama.cpp say."""

from __future__ import annotations

import base64
import itertools
import json
import unicodedata
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
import tiktoken
from gguf import GGUFReader
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from public_files import expected_ids, mistral_files, vocabularies

from lmdeploy.errors import ModelError
from lmdeploy.text.detokenize import Detokenizer
from lmdeploy.text.tokenizer import Tokenizer, load_tokenizer

WITH_IDS = (
    "command-r", "falcon", "gpt-2", "llama-bpe", "llama-spm", "mpt", "phi-3", "qwen2", "refact", "starcoder",
)  # fmt: skip
WITHOUT_IDS = ("aquila", "baichuan", "gpt-neox")  # the source states no expected ids
REFUSED = {
    "bert-bge": "tokenizer kind 'bert'",
    "deepseek-coder": "pre-tokenizer 'deepseek-coder'",
    "deepseek-llm": "pre-tokenizer 'deepseek-llm'",
    "gemma-4": "tokenizer kind 'gemma4'",
    "nomic-bert-moe": "tokenizer kind 't5'",
    "qwen35": "pre-tokenizer 'qwen35'",
}
SENTENCEPIECE = (
    "tokenizer.model.v1",
    "mistral_instruct_tokenizer_240216.model.v2",
    "mistral_instruct_tokenizer_240323.model.v3",
    "mistral_instruct_tokenizer_241114.model.v7",
)
TEKKEN = ("tekken_240718.json", "tekken_240911.json")
TEXTS = [
    "",
    " ",
    "Hello world",
    "  two  spaces\n\n\ttabs  and trailing ",
    "It's 1234567 o'clock, isn't it? We'LL see.",
    "naïve café — 漢字かな交じり文 👩‍👩‍👧 é e\u0301 \u200b\u00a0x",
    "def f(x):\n    return x**2  # ok\r\n\r\n",
    "\x00\x01\x7f <0x0A> ▁a▁ b",
    "Straße ǅungla СЛОВО слово १२३ ٣٤٥",
]
TEXT = st.text(max_size=40) | st.lists(st.sampled_from([*TEXTS, "  ", "\n", "a", "1", "'s"]), max_size=6).map(
    "".join
)
THOROUGH = settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))


@pytest.fixture(scope="session", autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


def vocabulary(name: str) -> Path:
    return vocabularies() / f"ggml-vocab-{name}.gguf"


def test_every_public_vocabulary_is_read_or_refused_here() -> None:
    found = {path.name[len("ggml-vocab-") : -len(".gguf")] for path in vocabularies().glob("*.gguf")}
    assert found == {*WITH_IDS, *WITHOUT_IDS, *REFUSED}


@pytest.mark.parametrize("name", WITH_IDS)
def test_gguf_ids_are_those_expected(name: str) -> None:
    tokenizer = load_tokenizer(vocabulary(name))
    cases = expected_ids(vocabulary(name))
    assert len(cases) > 40
    for text, ids in cases:
        assert tokenizer.encode(text, parse_special=True) == ids, text
        check_every_chunking(tokenizer, ids, text)


@pytest.mark.parametrize("name", WITHOUT_IDS)
def test_other_gguf_vocabularies_keep_the_text(name: str) -> None:
    tokenizer = load_tokenizer(vocabulary(name))
    for text in TEXTS:
        text = text.replace("e\u0301", "").replace("\x00", "").replace("▁", "")
        check_every_chunking(tokenizer, tokenizer.encode(text), text)


@pytest.mark.parametrize("name", REFUSED)
def test_other_kinds_are_refused_by_name(name: str) -> None:
    with pytest.raises(ModelError, match=f"{REFUSED[name]} is not supported") as caught:
        load_tokenizer(vocabulary(name))
    assert "\n" not in str(caught.value)


def check_every_chunking(tokenizer: Tokenizer, ids: list[int], text: str) -> None:
    """Token by token, in two parts cut anywhere, and at once."""
    whole = [[ids]] + [[ids[:at], ids[at:]] for at in range(1, min(len(ids), 40))] + [[[i] for i in ids]]
    for parts in whole:
        detokenizer = Detokenizer(tokenizer, skip_special_tokens=False)
        assert "".join([*map(detokenizer.feed, parts), detokenizer.finish()]) == text


def write_directory(folder: Path, name: str, data: bytes, **config: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_bytes(data)
    (folder / "config.json").write_text("{}")
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module", params=SENTENCEPIECE)
def mistral(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    path = mistral_files() / request.param
    folder = write_directory(tmp_path_factory.mktemp("mistral"), "tokenizer.model", path.read_bytes())
    return load_tokenizer(folder), sentencepiece.SentencePieceProcessor(str(path))


@THOROUGH
@given(text=TEXT)
def test_sentencepiece_ids_are_its_own(text: str, mistral: Any) -> None:
    ours, theirs = mistral
    if not any(piece in text for piece in ("<s>", "</s>", "<unk>")):
        assert ours.encode(text) == theirs.encode(text)


def test_sentencepiece_texts(mistral: Any) -> None:
    ours, theirs = mistral
    for text in TEXTS:
        ids = theirs.encode(text)
        assert ours.encode(text) == ids
        assert ours.encode(text, add_special_tokens=True) == [1, *ids]
        assert theirs.decode(ids) == text.replace("▁", " ")
        check_every_chunking(ours, ids, text.replace("▁", " "))
    assert (ours.bos_id, ours.eos_ids, ours.vocab_size) == (1, {2}, theirs.vocab_size())


@pytest.fixture(scope="module", params=TEKKEN)
def tekken(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    path = mistral_files() / request.param
    content = json.loads(path.read_text(encoding="utf-8"))
    count = content["config"]["default_num_special_tokens"]
    kept = content["vocab"][: content["config"]["default_vocab_size"] - count]
    ranks = {base64.b64decode(entry["token_bytes"]): entry["rank"] for entry in kept}
    theirs = tiktoken.Encoding(
        "x", pat_str=content["config"]["pattern"], mergeable_ranks=ranks, special_tokens={}
    )
    folder = write_directory(tmp_path_factory.mktemp("tekken"), "tekken.json", path.read_bytes())
    return load_tokenizer(folder), theirs, count


@THOROUGH
@given(text=TEXT)
def test_tekken_ids_are_those_of_tiktoken(text: str, tekken: Any) -> None:
    ours, theirs, count = tekken
    ids = [count + i for i in theirs.encode(text, disallowed_special=())]
    assert ours.encode(text) == ids
    check_every_chunking(ours, ids, text)


def test_tekken_control_tokens(tekken: Any) -> None:
    ours, _, count = tekken
    assert ours.encode("[INST][/INST]</s>", add_special_tokens=True, parse_special=True) == [1, 3, 4, 2]
    assert (ours.bos_id, ours.eos_ids, ours.vocab_size) == (1, {2}, 131072)
    assert ours.id_of("<SPECIAL_999>") == 999
    assert min(ours.encode("[INST]</s>")) >= count


def bytes_of_tokens(name: str, count: int) -> list[bytes]:
    """The first `count` tokens of a byte-level vocabulary as bytes, read by gguf-py and GPT-2's table."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    table = {chr(b): b for b in printable} | {chr(0x100 + n): b for n, b in enumerate(others)}
    tokens = GGUFReader(vocabulary(name)).fields["tokenizer.ggml.tokens"].contents()[:count]
    return [bytes(table[char] for char in token) for token in tokens]


CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
RANK_FILES = {
    "qwen.tiktoken": ("qwen2", 151643, CONTRACTION + r"\p{N}" + REST),
    "tokenizer.model": ("llama-bpe", 128000, CONTRACTION + r"\p{N}{1,3}" + REST),
}


@pytest.fixture(scope="module", params=RANK_FILES)
def ranked(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    vocabulary_name, count, pattern = RANK_FILES[request.param]
    tokens = bytes_of_tokens(vocabulary_name, count)
    data = b"".join(base64.b64encode(token) + b" %d\n" % rank for rank, token in enumerate(tokens))
    folder = write_directory(tmp_path_factory.mktemp("ranks"), request.param, data)
    ranks = {token: rank for rank, token in enumerate(tokens)}
    theirs = tiktoken.Encoding("x", pat_str=pattern, mergeable_ranks=ranks, special_tokens={})
    return load_tokenizer(folder), theirs, load_tokenizer(vocabulary(vocabulary_name))


@THOROUGH
@given(text=TEXT)
def test_rank_file_ids_are_those_of_tiktoken_and_of_the_gguf_file(text: str, ranked: Any) -> None:
    """Composed text: one of the two vocabularies composes first."""
    ours, theirs, of_gguf = ranked
    text = unicodedata.normalize("NFC", text)
    assert ours.encode(text) == theirs.encode(text, disallowed_special=()) == of_gguf.encode(text)
    check_every_chunking(ours, ours.encode(text), text)


def test_rank_file_control_tokens(ranked: Any) -> None:
    ours, theirs, of_gguf = ranked
    names = [of_gguf.decode([i], skip_special_tokens=False) for i in sorted(of_gguf.eos_ids)]
    for name in [*names, "<|im_end|>", "<|eot_id|>", "<|start_header_id|>", "<|im_start|>"]:
        if of_gguf.id_of(name) is not None:
            assert ours.encode(name, parse_special=True) == [of_gguf.id_of(name)]
            assert ours.encode(name) == theirs.encode(name, disallowed_special=())
    assert ours.eos_ids >= of_gguf.eos_ids - {ours.bos_id}


SENTENCES = [
    "the quick brown fox jumps over the lazy dog",
    "pack my box with five dozen liquor jugs, <tool> please",
    "I can't believe it's 12:30 already!",
    "ﬁne ｆｕｌｌ width and ½",
    "fox dog fox quick  box   box jumps",
]
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {"normalization_rule_name": "identity", "remove_extra_whitespaces": False},
    "normalising": {"normalization_rule_name": "nmt_nfkc"},
    "no prefix": {"add_dummy_prefix": False, "normalization_rule_name": "identity"},
    "user-defined": {
        "normalization_rule_name": "identity",
        "remove_extra_whitespaces": False,
        "user_defined_symbols": ["<tool>", "▁▁", "xyz"],
    },
    "runs without prefix": {  # as Gemma's vocabulary is made
        "normalization_rule_name": "identity",
        "remove_extra_whitespaces": False,
        "add_dummy_prefix": False,
        "user_defined_symbols": ["<tool>", "\n", "\n\n", "▁▁", "▁▁▁", "xyz"],
    },
}


def _options(kind: str, option: str) -> dict[str, Any]:
    """Of two equally good ways around a run of blanks, unigram may take another one."""
    chosen = dict(OPTIONS[option])
    if kind == "unigram" and "user_defined_symbols" in chosen:
        chosen["user_defined_symbols"] = ["<tool>", "xyz"]
    return chosen


@pytest.fixture(scope="module", params=itertools.product(["bpe", "unigram"], [True, False], OPTIONS), ids=str)
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    kind, byte_fallback, option = request.param
    folder = tmp_path_factory.mktemp("trained")
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(SENTENCES * 20),
        model_prefix=str(folder / "tokenizer"),
        model_type=kind,
        vocab_size=360 if byte_fallback else 100,
        byte_fallback=byte_fallback,
        hard_vocab_limit=False,
        minloglevel=2,
        **_options(kind, option),
    )
    data = (folder / "tokenizer.model").read_bytes()
    write_directory(folder, "tokenizer.model", data)
    theirs = sentencepiece.SentencePieceProcessor(str(folder / "tokenizer.model"))
    return load_tokenizer(folder), theirs, byte_fallback


WORDS = st.lists(
    st.sampled_from(
        [
            "fox",
            "the ",
            " ",
            "  ",
            "quick",
            "<tool>",
            "xyz",
            "box",
            "1",
            "½",
            "ﬁ",
            "é",
            "漢",
            "'s",
            "!",
            "<0x41>",
            "\n",
        ]
    ),
    max_size=8,
).map("".join)


@THOROUGH
@given(text=WORDS)
def test_trained_sentencepiece_ids(text: str, trained: Any) -> None:
    ours, theirs, byte_fallback = trained
    if text not in ("<tool>", "xyz"):  # stated in lmdeploy/text/pieces.py
        ids = theirs.encode(text)
        assert ours.encode(text) == ids
        if byte_fallback:
            detokenizer = Detokenizer(ours)
            assert "".join(detokenizer.feed([i]) for i in ids) + detokenizer.finish() == theirs.decode(ids)
