"""Where the tokenizer of a model is read from, and what the files around it add.

A GGUF file holds its own. In a directory the first of these counts: tokenizer.json, tekken.json, a rank file
(qwen.tiktoken), tokenizer.model (SentencePiece or ranks). All but the first are converted once and kept.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import tokenizers

from lmdeploy.errors import ModelError
from lmdeploy.logging import get_logger
from lmdeploy.models.fields import shown
from lmdeploy.models.files import is_there, locate, read_json, read_text, unreadable
from lmdeploy.models.gguf import GGUFFile
from lmdeploy.text.conversion_cache import content_key, converted
from lmdeploy.text.declared_tokens import DeclaredTokens, optional_json, read_declared
from lmdeploy.text.gguf_vocabulary import backend_from_gguf, token_id
from lmdeploy.text.pieces import CONTROL, NORMAL, USER_DEFINED, Pieces, add_markers, backend_from_pieces
from lmdeploy.text.rank_files import (
    RankVocabulary,
    backend_from_ranks,
    is_rank_file,
    read_tekken,
    read_tiktoken,
)
from lmdeploy.text.sentencepiece_file import SentencePieceModel, read_sentencepiece

_GGUF_NAMES = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}


@dataclass(frozen=True, slots=True)
class TokenizerSource:
    """named: bos_token, eos_token, ... -> text, as chat templates use them."""

    backend: tokenizers.Tokenizer
    source: str
    bos_id: int | None
    eos_ids: list[int]
    named: Mapping[str, str]


def read_source(path: str | Path) -> TokenizerSource:
    """Of a model directory or a GGUF file. ModelError when missing, damaged or unsupported."""
    files = locate(path)
    return _from_gguf(files.path) if files.format == "gguf" else _from_directory(files.path)


WRITTEN_FILES = ("tokenizer.json", "tokenizer_config.json", "config.json")


def write_as_files(source: TokenizerSource, templates: Mapping[str, str], directory: Path) -> None:
    """A tokenizer and its chat templates as WRITTEN_FILES, as in a model directory: these are read faster
    than a GGUF file's metadata. config.json holds the ends of a turn only."""
    source.backend.save(str(directory / "tokenizer.json"))
    entries = [{"name": name, "template": text} for name, text in templates.items()]
    config = {**source.named, "chat_template": entries or None}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    (directory / "config.json").write_text(json.dumps({"eos_token_id": source.eos_ids}))


def _from_gguf(path: Path) -> TokenizerSource:
    file = GGUFFile(path)
    metadata, source = file.metadata, str(path)
    file.close()
    backend = backend_from_gguf(metadata, source)
    tokens = metadata["tokenizer.ggml.tokens"]
    ids = {key: token_id(metadata, key, len(tokens), source) for key in (*_GGUF_NAMES.values(), "eot", "eom")}
    named = {name: tokens[i] for name, key in _GGUF_NAMES.items() if (i := ids[key]) is not None}
    ends = [i for key in ("eos", "eot", "eom") if (i := ids[key]) is not None]
    return TokenizerSource(backend, source, ids["bos"], ends, named)


def _from_directory(directory: Path) -> TokenizerSource:
    declared = read_declared(directory)
    backend, named, ends = _backend(directory, declared)
    named = {**named, **declared.named}
    _complete_added(backend, declared, named, str(directory))
    ids = {key: backend.token_to_id(text) for key, text in named.items()}
    for key in ("bos_token", "eos_token"):
        if key in ids and ids[key] is None:
            get_logger().warning(
                "%s: %s is %r, which is no token; it is left out", directory, key, named[key]
            )
    found = [ids.get("eos_token"), *(backend.token_to_id(text) for text in ends)]
    eos_ids = [i for i in found if i is not None] + _declared_ends(directory, backend)
    return TokenizerSource(backend, str(directory), ids.get("bos_token"), eos_ids, named)


def _declared_ends(directory: Path, backend: tokenizers.Tokenizer) -> list[int]:
    """eos_token_id of the model's own files. ModelError when it is no id of this vocabulary."""
    size = id_count(backend)
    rows = optional_json(directory / "config.json").get("vocab_size")
    size = max(size, rows) if isinstance(rows, int) else size
    ends: list[int] = []
    for name in ("generation_config.json", "config.json"):
        value = optional_json(directory / name).get("eos_token_id")
        for i in value if isinstance(value, list) else [] if value is None else [value]:
            if type(i) is not int or not 0 <= i < size:
                raise ModelError(
                    f"{directory / name}: eos_token_id is {shown(value)}; a token id from 0 to {size - 1} is"
                    " expected, or a list of them."
                )
            ends.append(i)
    return ends


Found = tuple[tokenizers.Tokenizer, dict[str, str], tuple[str, ...]]  # with named tokens and ends of a turn


def _backend(directory: Path, declared: DeclaredTokens) -> Found:
    if is_there(directory / "tokenizer.json"):
        return _from_json(directory / "tokenizer.json"), {}, ()
    if is_there(directory / "tekken.json"):
        path = directory / "tekken.json"
        return _from_ranks(read_tekken(read_json(path), str(path)), declared, _read(path), str(path))
    ranks = sorted(directory.glob("*.tiktoken"))
    path = ranks[0] if ranks else directory / "tokenizer.model"
    if not is_there(path):
        raise ModelError(
            f"{directory}: tokenizer.json is missing, and so are tekken.json, qwen.tiktoken and"
            " tokenizer.model."
        )
    data = _read(path)
    if ranks or is_rank_file(data[:512]):
        special = {i: token.content for i, token in declared.added.items()}
        return _from_ranks(read_tiktoken(data, path.name, special, str(path)), declared, data, str(path))
    return _from_sentencepiece(read_sentencepiece(data, str(path)), declared, data, str(path))


def id_count(backend: tokenizers.Tokenizer) -> int:
    """The highest id and one. Most have no gaps, which is seen faster than a dictionary is made."""
    count: int = backend.get_vocab_size(with_added_tokens=True)
    if all(backend.id_to_token(i) is not None for i in range(count)):
        return count
    added = max(backend.get_added_tokens_decoder(), default=-1)
    return max(max(backend.get_vocab().values(), default=-1), added) + 1


def _from_json(path: Path) -> tokenizers.Tokenizer:
    text = read_text(path)
    try:
        backend = tokenizers.Tokenizer.from_str(text)
    except Exception as error:  # the library raises nothing more specific
        raise ModelError(f"{path}: not a sound tokenizer: {str(error).splitlines()[0]}.") from None
    _tell_shared_ids(backend, path)
    return backend


def _tell_shared_ids(backend: tokenizers.Tokenizer, path: Path) -> None:
    first: dict[int, str] = {}
    for text, i in backend.get_vocab().items():
        if first.setdefault(i, text) != text:
            get_logger().warning(
                "%s: tokens %r and %r have the same id, %d; it is read as %r",
                *(path, *sorted((first[i], text)), i, backend.id_to_token(i)),
            )
            return


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise unreadable(path, error) from None


def _from_ranks(vocabulary: RankVocabulary, declared: DeclaredTokens, data: bytes, source: str) -> Found:
    special = {str(i): text for i, text in vocabulary.special.items()}
    key = content_key("ranks", data, special, vocabulary.pattern, vocabulary.composes)
    backend = converted(key, lambda: backend_from_ranks(vocabulary, source))
    named = {}
    if vocabulary.begin is not None:
        named["bos_token"] = vocabulary.begin
    if vocabulary.ends:
        named["eos_token"] = vocabulary.ends[0]
    _add_markers(backend, {**named, **declared.named}, declared, begin=vocabulary.begin is not None)
    return backend, named, vocabulary.ends


def _from_sentencepiece(
    model: SentencePieceModel, declared: DeclaredTokens, data: bytes, source: str
) -> Found:
    """Added tokens may rename pieces of the file that were kept free for them."""
    texts, kinds = list(model.texts), list(model.kinds)
    for i, token in declared.added.items():
        if i < len(texts) and kinds[i] in (NORMAL, USER_DEFINED):
            texts[i], kinds[i] = token.content, CONTROL if token.special else USER_DEFINED
    prefix = "none"
    if model.dummy_prefix and declared.flag("add_prefix_space", True):
        prefix = "every" if declared.flag("legacy", True) else "first"
    pieces = Pieces(
        texts,
        model.scores,
        kinds,
        model.unigram,
        prefix,
        collapse_spaces=model.remove_extra_spaces,
        charsmap=model.charsmap,
    )
    key = content_key("sentencepiece", data, texts, kinds, prefix)
    backend = converted(key, lambda: backend_from_pieces(pieces, source))
    ids = {"bos_token": model.begin, "eos_token": model.end}
    named = {name: texts[i] for name, i in ids.items() if 0 <= i < len(texts)}
    _add_markers(backend, {**named, **declared.named}, declared, begin=True)
    return backend, named, ()


def _add_markers(
    backend: tokenizers.Tokenizer, named: Mapping[str, str], declared: DeclaredTokens, begin: bool
) -> None:
    wanted = {
        "bos_token": declared.flag("add_bos_token", begin),
        "eos_token": declared.flag("add_eos_token", False),
    }
    used = {name: named[name] for name, on in wanted.items() if on and name in named}
    ids = {text: i for text in used.values() if (i := backend.token_to_id(text)) is not None}
    first, last = ([used[name]] if used.get(name) in ids else [] for name in wanted)
    add_markers(backend, first, last, ids)


def _complete_added(
    backend: tokenizers.Tokenizer, declared: DeclaredTokens, named: Mapping[str, str], source: str
) -> None:
    """Add tokens that only the files beside name; make named and further special tokens control tokens."""
    known = {token.content for token in backend.get_added_tokens_decoder().values()}
    for i, token in declared.added.items():
        if token.content in known:
            continue
        backend.add_tokens([token])
        if backend.token_to_id(token.content) != i:
            raise ModelError(
                f"{source}: the added token {token.content!r} should have id {i}, but in this vocabulary it"
                f" has {backend.token_to_id(token.content)}."
            )
    special = {t.content for t in backend.get_added_tokens_decoder().values() if t.special}
    wanted = dict.fromkeys([*named.values(), *declared.extra])
    missing = [text for text in wanted if text not in special and backend.token_to_id(text) is not None]
    backend.add_special_tokens([tokenizers.AddedToken(t, special=True, normalized=False) for t in missing])
