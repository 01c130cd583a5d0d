"""Installs the quantisers we are compared with, each in its own environment, and llama.cpp's tools.

    python benchmarks/lite/setup.py DIR                           everything (about 5 GB and 15 minutes)
    python benchmarks/lite/setup.py DIR --only gptqmodel llmcompressor

DIR/env holds the environments, DIR/llamacpp the tools, and DIR/rivals.toml what `bench_lite.py --rivals`
reads. What is there already is kept. What does not install is written there with its last line, so that the
results name it, and the others go on.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from peers.setup import llama_cpp, run

TORCH = "torch==2.13.0"
# Environment: what its builds need to be there before, then the packages. AutoAWQ is no longer developed and
# works with the transformers of its last months only.
RIVALS = {
    "autoawq": (["setuptools", "wheel"], ["transformers==4.51.3", "autoawq==0.2.9"]),
    "gptqmodel": (["setuptools", "wheel", "ninja", "packaging"], ["gptqmodel==7.6.0"]),
    "llmcompressor": ([], ["llmcompressor==0.14.0.1"]),
}
LLAMA_CPP = "llama.cpp"


def environment(root: Path, name: str) -> Path:
    """The environment's Python. RuntimeError with the last line of what pip said."""
    folder = root / "env" / name
    python = folder / "bin" / "python"
    if not (folder / "installed").exists():
        build, packages = RIVALS[name]
        pip = (python, "-m", "pip", "install", "-q")
        run(sys.executable, "-m", "venv", folder)
        run(*pip, TORCH, "numpy", *build)
        run(*pip, *(["--no-build-isolation"] if build else []), TORCH, *packages)
        (folder / "installed").touch()
    return python


def entry(root: Path, name: str) -> list[str]:
    """Lines of rivals.toml: where it is, or why it is not there."""
    try:
        if name == LLAMA_CPP:
            key, value = "bin", str(llama_cpp(root))
        else:
            key, value = "python", str(environment(root, name))
    except (RuntimeError, OSError) as error:
        print(f"  failed: {error}", flush=True)
        key, value = "error", str(error)
    return [f'["{name}"]', f"{key} = {json.dumps(value)}", ""]


def main() -> None:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("root", type=Path, metavar="DIR")
    names = [*RIVALS, LLAMA_CPP]
    parser.add_argument("--only", nargs="+", choices=names, default=names)
    args = parser.parse_args()
    root = args.root.resolve()
    lines: list[str] = []
    for number, name in enumerate(args.only, 1):
        print(f"[{number}/{len(args.only)}] {name}", flush=True)
        lines += entry(root, name)
    root.mkdir(parents=True, exist_ok=True)
    (root / "rivals.toml").write_text("\n".join(lines))
    failed = sum(line.startswith("error") for line in lines)
    print(f"{root / 'rivals.toml'} written; {failed} of {len(args.only)} failed")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
