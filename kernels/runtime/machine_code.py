"""Resource usage and instruction counts of compiled functions, by cuobjdump and nvdisasm."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections import Counter
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

from flexq_bench.kernels.errors import CompileError, UnsupportedError
from flexq_bench.kernels.runtime.nvrtc import Cubin, compiler_version
from flexq_bench.kernels.runtime.occupancy import RESERVED_SHARED_BYTES

_USAGE = re.compile(
    r"Function (?P<function>\w+):\s+REG:(?P<registers>\d+) STACK:(?P<stack>\d+) "
    r"SHARED:(?P<shared>\d+) LOCAL:(?P<local>\d+)"
)
_SECTION = re.compile(r"\.section\s+\.text\.(?P<function>\w+)")
_INSTRUCTION = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?(?P<name>[A-Z][A-Z0-9_]*)")
_LABEL = re.compile(r"^\s*(?P<label>\.L_\w+):")
_BRANCH = re.compile(r"\bBRA\b.*`\((?P<label>\.L_\w+)\)")


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


def check_tools() -> None:
    """Raise UnsupportedError unless NVRTC, cuobjdump and nvdisasm are installed."""
    compiler_version()
    for tool in ("cuobjdump", "nvdisasm"):
        _find(tool)


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
    return {function: Counter(listing.names) for function, listing in _listings(cubin).items()}


def innermost_loops(cubin: Cubin) -> dict[str, list[Counter[str]]]:
    """Count the instructions of each function's innermost loops, in the order of addresses.

    Raises UnsupportedError if nvdisasm is not installed.
    """
    return {
        function: [Counter(listing.names[begin:end]) for begin, end in listing.innermost()]
        for function, listing in _listings(cubin).items()
    }


@dataclass(frozen=True, slots=True)
class _Listing:
    """Disassembly of a function.

    names: of its instructions, in order. labels: label to index of the instruction that follows
    it. branches: index of a branch instruction to the label of its target.
    """

    names: list[str] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)
    branches: dict[int, str] = field(default_factory=dict)

    def innermost(self) -> list[tuple[int, int]]:
        """Return the index ranges [begin, end) of loops that contain no other loop."""
        loops = [
            (self.labels[label], at + 1)
            for at, label in self.branches.items()
            if self.labels.get(label, at + 1) <= at
        ]
        return sorted(
            (begin, end)
            for begin, end in loops
            if not any(begin <= b and e <= end and (b, e) != (begin, end) for b, e in loops)
        )


@lru_cache(maxsize=128)  # half a second each
def _listings(cubin: Cubin) -> dict[str, _Listing]:
    listings: dict[str, _Listing] = {}
    current = _Listing()
    for line in _run("nvdisasm", "--print-code", cubin).splitlines():
        if section := _SECTION.search(line):
            current = listings.setdefault(section["function"], _Listing())
        elif label := _LABEL.search(line):
            current.labels[label["label"]] = len(current.names)
        elif instruction := _INSTRUCTION.search(line):
            if branch := _BRANCH.search(line):
                current.branches[len(current.names)] = branch["label"]
            current.names.append(instruction["name"])
    return listings


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
        raise UnsupportedError(
            f"{tool} is found by cuda-pathfinder: pip install 'flexq-bench[static]'"
        ) from error
    path: str | None = find_nvidia_binary_utility(tool)
    if path is None:
        raise UnsupportedError(f"{tool} is not installed: pip install 'flexq-bench[static]'")
    return path
