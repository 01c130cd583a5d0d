"""The machine code of the hot loops: sums must stay in registers."""

from __future__ import annotations

import platform
import re
import shutil
import subprocess

import pytest

from lmdeploy.turbomind import _turbomind

INSTRUCTION = re.compile(r"^\s*([0-9a-f]+):\t(\S+)\s*(.*)$")
STACK = re.compile(r"\(%r[bs]p\)")  # sums have fixed places there; arrays are indexed
HOT = {"vpdpbusd": "zmm", "vdpbf16ps": "zmm", "vpdpwssd": "zmm", "vpmaddwd": "ymm", "vfmadd231ps": "[yz]mm"}


def instructions() -> list[tuple[int, str, str]]:
    command = ["objdump", "-d", "--no-show-raw-insn", _turbomind.__file__]
    text = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout
    matches = (INSTRUCTION.match(line) for line in text.splitlines())
    return [(int(m[1], 16), m[2], m[3]) for m in matches if m]


def innermost_loops(code: list[tuple[int, str, str]]) -> list[list[tuple[int, str, str]]]:
    """Runs of code that end in a jump back to their start and hold no other such run."""
    index = {address: i for i, (address, _, _) in enumerate(code)}
    loops, last_start = [], -1
    for i, (address, name, operands) in enumerate(code):
        target = re.match(r"^([0-9a-f]+)\b", operands)
        if not name.startswith("j") or not target or int(target[1], 16) >= address:
            continue
        start = index.get(int(target[1], 16))
        if start is not None and start > last_start:
            loops.append(code[start : i + 1])
            last_start = start
    return loops


def ends_group(loop: list[tuple[int, str, str]]) -> bool:
    """What follows the loop over a group can look like a loop of its own: there results lie in memory."""
    return any(name == "vcvtdq2ps" for _, name, _ in loop)


@pytest.mark.skipif(shutil.which("objdump") is None, reason="needs objdump of binutils")
@pytest.mark.skipif(platform.machine() != "x86_64", reason="reads x86-64 code")
def test_hot_loops_touch_no_stack():
    loops = innermost_loops(instructions())
    for hot, register in HOT.items():
        found = [x for x in loops if sum(name == hot for _, name, _ in x) >= 4 and not ends_group(x)]
        assert len(found) >= 8, f"too few loops with {hot}: the test no longer sees the kernels"
        for loop in found:
            spills = [ops for _, _, ops in loop if re.search(register, ops) and STACK.search(ops)]
            assert not spills, f"loop at {loop[0][0]:x} with {hot} keeps sums on the stack: {spills[:4]}"
