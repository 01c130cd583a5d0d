"""Who may import whom and who may name a model family: read from the source, also inside functions.

The rules are those of docs/architecture.md. What a package imports of its own is free.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from lmdeploy.models.registry import FAMILIES

ROOT = Path(__file__).resolve().parents[2] / "lmdeploy"
BASE = {"errors", "field_checks", "config", "speculative", "env", "logging", "version"}
TEXT_AND_NUMBERS = BASE | {"quant", "text"}

# Package or module below lmdeploy -> what of lmdeploy it may import besides itself.
MAY_IMPORT = {
    "errors": set[str](),
    "env": BASE,
    "logging": BASE,
    "config": BASE,
    "field_checks": {"errors"},
    "speculative": {"errors", "field_checks"},
    "quant": BASE,
    "models": BASE | {"quant"},
    "text": BASE | {"models"},  # vocabulary and template of a GGUF file are in its metadata
    "engine": BASE,
    "turbomind": BASE | {"engine", "models", "quant"},
    "pytorch": BASE | {"engine", "models", "quant"},
    "messages": BASE | {"engine"},
    "runtime": TEXT_AND_NUMBERS | {"models", "engine", "turbomind", "pytorch"},
    "pipeline": TEXT_AND_NUMBERS | {"models", "engine", "runtime", "messages"},
    "serve": TEXT_AND_NUMBERS | {"models", "engine", "runtime", "messages"},
    "lite": TEXT_AND_NUMBERS | {"models"},
    "quality": TEXT_AND_NUMBERS | {"models", "lite", "engine", "runtime", "messages", "pipeline"},
    "cli": TEXT_AND_NUMBERS
    | {"models", "engine", "turbomind", "runtime", "messages", "pipeline", "serve", "lite", "quality"},
    "__main__": {"cli"},
    "": {"config", "pipeline", "speculative"},  # lmdeploy/__init__.py
}
# Third-party package -> the only places that may import it.
ONLY_IN = {
    "torch": ("models/reference.py", "pytorch/", "lite/", "quality/"),
    "transformers": ("cli/prompt_sources.py",),  # one side of a comparison, when it is asked for
    "ray": (),
    "fastapi": ("serve/",),
    "starlette": ("serve/",),
    "uvicorn": ("serve/",),
    "pydantic": ("serve/",),
    "prometheus_client": ("serve/",),
    "opentelemetry": ("serve/tracing.py",),
    "yaml": ("cli/",),
    "jinja2": ("text/",),
    "tokenizers": ("text/",),
    "safetensors": ("models/", "lite/", "cli/smoke.py"),
    "huggingface_hub": ("models/", "lite/"),
    "prompt_toolkit": ("cli/",),
    "llguidance": ("runtime/",),
}
ENGINE_THIRD_PARTY = {"numpy"}
NO_FAMILY_NAMES = r"llm[-_]smollm2|llama3|llama\.cpp|llama_4_scaling_beta"
# Families that there are, without their version where that is a name, and some that there may be.
STEMS = {re.sub(r"(?<=\D{4})\d+$", "", family.name).replace("_", "_?") for family in FAMILIES}
FAMILY_NAMES = re.compile("|".join(sorted(STEMS | {"mixtral", "deepseek", "baichuan", "falcon"})), re.I)
# The registry lists the families; the smoke model must be of one; GGUF names its tokenizers after families.
FAMILY_EXEMPT = (
    "models/families/",
    "models/registry.py",
    "serve/parsers/",
    "vl/",
    "cli/smoke.py",
    "text/gguf_vocabulary.py",
    "text/split_rules.py",
    "text/rank_files.py",
    "text/sources.py",
    "text/builtin_templates.py",
)


def sources() -> list[Path]:
    return sorted(p for p in ROOT.rglob("*.py") if "__pycache__" not in p.parts)


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def owner(path: Path) -> str:
    """The package or module below lmdeploy that a file belongs to."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return "" if parts == ("__init__",) else parts[0]


def imported(path: Path, tree: ast.AST) -> Iterator[str]:
    """Dotted names of all modules a file imports anywhere; `from a import b` gives a.b."""
    package = ("lmdeploy", *path.relative_to(ROOT).parent.parts)
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else ()
            module = ".".join((*above, *filter(None, [node.module])))
            yield from (f"{module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            first = node.args[0]
            if isinstance(first, ast.Constant) and isinstance(first.value, str):
                yield first.value


def imports_of(path: Path) -> list[str]:
    return list(imported(path, ast.parse(path.read_text())))


@pytest.mark.parametrize("path", sources(), ids=name_of)
def test_imports_point_downwards(path: Path) -> None:
    own = owner(path)
    allowed = MAY_IMPORT[own] | {own}
    for module in imports_of(path):
        parts = module.split(".")
        if parts[0] != "lmdeploy" or len(parts) < 2 or parts[1].startswith("__version__"):
            continue
        assert parts[1] in allowed, f"{name_of(path)} imports {module}; {own or 'lmdeploy'} may not"


@pytest.mark.parametrize("path", sources(), ids=name_of)
def test_third_party_packages_stay_where_they_belong(path: Path) -> None:
    name = name_of(path)
    for module in imports_of(path):
        top = module.split(".")[0]
        places = ONLY_IN.get(top)
        assert places is None or name.startswith(places), f"{name} imports {top}"
        if owner(path) == "engine":
            known = top in sys.stdlib_module_names or top in ENGINE_THIRD_PARTY or top == "lmdeploy"
            assert known, f"{name} imports {top}: the engine knows NumPy only"


def check_imports(path: Path) -> None:
    test_imports_point_downwards(path)
    test_third_party_packages_stay_where_they_belong(path)


def code_words(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """(line, text) of every identifier and string of the code, docstrings and comments left out."""
    docstrings = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef))
        and node.body
        and isinstance(node.body[0], ast.Expr)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
            yield node.lineno, node.value
        elif isinstance(node, ast.Name):
            yield node.lineno, node.id
        elif isinstance(node, ast.Attribute):
            yield node.lineno, node.attr
        elif isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            yield node.lineno, node.name


@pytest.mark.parametrize("path", sources(), ids=name_of)
def test_no_family_is_named_outside_its_file(path: Path) -> None:
    name = name_of(path)
    if name.startswith(FAMILY_EXEMPT):
        return
    for line, word in code_words(ast.parse(path.read_text())):
        found = FAMILY_NAMES.search(re.sub(NO_FAMILY_NAMES, "", word))
        assert not found, f"{name}:{line} names the family {found[0]!r}"


def test_the_rules_know_every_package() -> None:
    assert {owner(p) for p in sources()} <= set(MAY_IMPORT)


def test_there_is_no_cycle_between_packages() -> None:
    edges: dict[str, set[str]] = {}
    for path in sources():
        for module in imports_of(path):
            parts = module.split(".")
            if parts[0] == "lmdeploy" and len(parts) > 1 and parts[1] in MAY_IMPORT:
                edges.setdefault(owner(path), set()).add(parts[1])
    for start in edges:
        reached, todo = set[str](), [*(edges[start] - {start})]
        while todo:
            name = todo.pop()
            if name not in reached:
                reached.add(name)
                todo += edges.get(name, set()) - {name}
        assert start not in reached, f"{start} imports itself through others"


def test_planted_faults_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[__name__], "ROOT", tmp_path)
    bad = tmp_path / "engine" / "bad.py"
    bad.parent.mkdir()
    for text in ("from ..serve import x", "import torch", "def f():\n    from lmdeploy import pipeline"):
        bad.write_text(text)
        with pytest.raises(AssertionError):
            check_imports(bad)
    bad.write_text("if spec.family == 'Qwen2': pass")
    with pytest.raises(AssertionError):
        test_no_family_is_named_outside_its_file(bad)


BLOCKED = """
import sys
import time
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {blocked!r}:
            raise ImportError(name + " must not be imported")
sys.meta_path.insert(0, Refuse())
begin = time.process_time()
{statement}
print(time.process_time() - begin)
"""


def seconds(statement: str, *blocked: str, runs: int = 3) -> float:
    """CPU time of a statement in a fresh interpreter without some packages, best of `runs`."""
    code = BLOCKED.format(blocked=set(blocked), statement=statement)
    times = []
    for _ in range(runs):
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        times.append(float(done.stdout.split()[-1]))
    return min(times)


HEAVY = ("torch", "transformers", "tokenizers", "numpy", "fastapi", "pydantic", "rich", "prompt_toolkit")


def test_import_lmdeploy_is_fast_and_light() -> None:
    assert seconds("import lmdeploy; lmdeploy.GenerationConfig()", *HEAVY) < 0.3


def test_parsers_are_built_without_engines() -> None:
    statement = "from lmdeploy.cli.main import build_parser; build_parser().format_help()"
    assert seconds(statement, *HEAVY) < 0.3


def test_base_modules_import_without_torch() -> None:
    modules = [
        ".".join(("lmdeploy", *p.relative_to(ROOT).with_suffix("").parts)).removesuffix(".__init__")
        for p in sources()
        if p.stem != "__main__" and not name_of(p).startswith(ONLY_IN["torch"])
    ]
    modules += ["lmdeploy.pytorch", "lmdeploy.pytorch.plan"]
    seconds("import " + ", ".join(modules), "torch", "transformers", "ray", "matplotlib", runs=1)


# Files that hand the whole environment on without looking at a variable.
PASS_ENVIRONMENT = ("env.py", "cli/check_env.py")


@pytest.mark.parametrize("path", sources(), ids=name_of)
def test_environment_variables_are_read_in_one_file(path: Path) -> None:
    used = {
        ast.unparse(node) for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Attribute)
    }
    assert name_of(path) in PASS_ENVIRONMENT or not used & {"os.environ", "os.getenv"}
