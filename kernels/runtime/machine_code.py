"""Resource usage and instruction counts of compiled functions, by cuobjdump and nvdisasm."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from kernels.errors import CompileError, UnsupportedError
from kernels.runtime.nvrtc import Cubin
from kernels.runtime.occupancy import RESERVED_SHARED_BYTES

_USAGE = re.compile(
    r"Function (?P<function>\w+):\s+REG:(?P<registers>\d+) STACK:(?P<stack>\d+) "
    r"SHARED:(?P<shared>\d+) LOCAL:(?P<local>\d+)"
)
_SECTION = re.compile(r"\.section\s+\.text\.(?P<function>\w+)")
_INSTRUCTION = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?(?P<name>[A-Z][A-Z0-9_]*)")


@dataclass(frozen=True, slots=True)
class Resources:
    """Resource usage of one function.

    Per thread: registers, bytes of stack (spilled registers included) and of local memory.
    shared_bytes: static shared memory of a block.
    """

    registers: int
    stack_bytes: int
    local_bytes: int
    shared_bytes: int


def resources(cubin: Cubin) -> dict[str, Resources]:
    """Return the resources by function. Raises UnsupportedError if cuobjdump is not installed."""
    text = _run("cuobjdump", "--dump-resource-usage", cubin)
    return {
        usage["function"]: Resources(
            int(usage["registers"]),
            int(usage["stack"]),
            int(usage["local"]),
            _declared_bytes(int(usage["shared"]), cubin.arch),
        )
        for usage in _USAGE.finditer(text)
    }


def instructions(cubin: Cubin) -> dict[str, Counter[str]]:
    """Count the instructions of each kind (BMMA, LDGSTS …) in each function's SASS.

    Raises UnsupportedError if nvdisasm is not installed.
    """
    counts: dict[str, Counter[str]] = {}
    current: Counter[str] = Counter()
    for line in _run("nvdisasm", "--print-code", cubin).splitlines():
        if section := _SECTION.search(line):
            current = counts.setdefault(section["function"], Counter())
        elif instruction := _INSTRUCTION.search(line):
            current[instruction["name"]] += 1
    return counts


def _declared_bytes(reported: int, arch: str) -> int:
    """Subtract the reserved bytes, which cuobjdump includes from compute capability 9.0 on."""
    reserved = RESERVED_SHARED_BYTES if int(arch.removeprefix("sm_")) >= 90 else 0
    return max(0, reported - reserved)


def _run(tool: str, option: str, cubin: Cubin) -> str:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin.code)
        done = subprocess.run(
            [_find(tool), option, str(path)], capture_output=True, text=True, check=False
        )
    if done.returncode != 0:
        raise CompileError(f"{tool} cannot read {cubin.source}: {done.stderr.strip()}")
    return done.stdout


def _find(tool: str) -> str:
    try:
        from cuda.pathfinder import find_nvidia_binary_utility
    except ImportError as error:
        raise UnsupportedError(f"{tool} is found through cuda-pathfinder: install it") from error
    path: str | None = find_nvidia_binary_utility(tool)
    if path is None:
        raise UnsupportedError(f"{tool} is not installed: pip install nvidia-cuda-{tool}")
    return path
