"""API keys: files, hashes, names, and a change while the server runs."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import pytest
from serve_fakes import Api

from lmdeploy.errors import ConfigError
from lmdeploy.serve.keys import Keys, key_of


def hashed(secret: str) -> str:
    return "sha256:" + hashlib.sha256(secret.encode()).hexdigest()


def names(keys: Keys, *secrets: str) -> list[str | None]:
    found = [keys.find([secret]) for secret in secrets]
    return [key.name if key is not None else None for key in found]


def test_keys_hashes_and_files(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text(f"# people\nalice a\n\n  bob {hashed('b').upper().replace('SHA256', 'sha256')}\nc\n")
    keys = Keys(["d", hashed("e"), f"@{file}"])
    assert len(keys) == 5
    assert names(keys, "a", "b", "f") == ["alice", "bob", None]
    assert names(keys, "c", "d", "e") == [key_of(secret).name for secret in "cde"]
    assert names(keys, hashed("b"), "@" + str(file), "") == [
        None,
        None,
        None,
    ]  # the hash itself opens nothing


def test_a_key_is_nowhere_in_memory_as_it_is(tmp_path: Path) -> None:
    assert "secret" not in repr(vars(Keys(["secret"])))


def test_without_keys_everybody_may_but_an_empty_file_lets_nobody_in(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("# nobody yet\n")
    assert not Keys().required
    assert Keys([f"@{file}"]).required


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("one two three", "line 1: a line is KEY or NAME KEY, got 3 words"),
        ("ok\nname sha256:12", "line 2: an API key that begins with sha256: needs 64 hexadecimal digits"),
        (None, "cannot be read: No such file"),
    ],
)
def test_files_at_fault(tmp_path: Path, text: str | None, message: str) -> None:
    file = tmp_path / "keys"
    if text is not None:
        file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        Keys([f"@{file}"])
    assert message in caught.value.message
    assert "name sha256:12" not in caught.value.message


def test_changes_count_and_faults_change_nothing(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("a\n")
    keys = Keys([f"@{file}", "fixed"])
    assert not keys.refresh()
    file.write_text("new b\n")
    assert keys.refresh()
    assert names(keys, "a", "b")[0] is None
    assert keys.find(["b"]) and keys.find(["fixed"])
    for break_it in (lambda: file.write_text("one two three\n"), lambda: os.remove(file)):
        break_it()
        assert not keys.refresh()
        assert keys.find(["b"])
    file.write_text("c\n")
    assert keys.refresh()
    assert names(keys, "b") == [None]


@pytest.mark.asyncio(loop_scope="module")
async def test_a_running_server_follows_its_file(server: Api, tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("alice a\n")
    closed = server.configure(api_keys=(f"@{file}",))

    async def status(secret: str) -> int:
        answer = await closed.http.get("/v1/models", headers={"x-api-key": secret})
        return answer.status_code

    assert [await status("a"), await status("b")] == [200, 401]
    file.write_text(f"bob {hashed('b')}\n")
    closed.server.keys.refresh()
    assert [await status("a"), await status("b")] == [401, 200]
