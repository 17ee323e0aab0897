"""CUDA sources to machine code with NVRTC, with a cache on disk. Needs no GPU and no driver."""

from __future__ import annotations

import hashlib
import os
import tempfile
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

import platformdirs

from kernels.errors import CompileError, UnsupportedError

COMMON_OPTIONS = ("--std=c++17",)


@dataclass(frozen=True, slots=True)
class Build:
    """One way a source is compiled: its file in kernels/csrc and its `-D` defines.

    min_sm: the first architecture that it compiles for, 80 for sm_80.
    """

    source: str
    defines: tuple[tuple[str, int], ...] = ()
    min_sm: int = 80

    @classmethod
    def of(cls, source: str, *, min_sm: int = 80, **defines: int) -> Build:
        return cls(source, tuple(sorted(defines.items())), min_sm)

    def runs_on(self, arch: str) -> bool:
        """Whether it compiles for an architecture, for example "sm_86"."""
        return int(arch.removeprefix("sm_")) >= self.min_sm

    @property
    def name(self) -> str:
        """For people, for example `flexq_btc.cu A_BITS=6 STAGES=4`."""
        return " ".join([self.source, *(f"{name}={value}" for name, value in self.defines)])


@dataclass(frozen=True, slots=True)
class Cubin:
    """Machine code of one source for one architecture and one set of defines."""

    source: str
    arch: str
    code: bytes

    @property
    def hash(self) -> str:
        """SHA-256 of the machine code: equal hashes are the same kernel."""
        return hashlib.sha256(self.code).hexdigest()


def source_names() -> tuple[str, ...]:
    """The `.cu` files of kernels/csrc."""
    return tuple(sorted(f.name for f in _csrc().iterdir() if f.name.endswith(".cu")))


@cache
def sources_hash() -> str:
    """SHA-256 over every file of kernels/csrc: changes whenever any kernel's source does."""
    digest = hashlib.sha256()
    for path in sorted(_csrc().iterdir()):
        if path.suffix in (".cu", ".cuh"):
            digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


@cache
def compile_build(build: Build, arch: str) -> Cubin:
    """Machine code of a build for arch (for example "sm_90").

    Raises CompileError with NVRTC's log, UnsupportedError if NVRTC isn't installed.
    """
    source = build.source
    options = (
        f"--gpu-architecture={arch}",
        *COMMON_OPTIONS,
        f"--include-path={_csrc()}",
        *(f"--define-macro={name}={value}" for name, value in build.defines),
    )
    cached = _cache_folder() / f"{_key(source, options)}.cubin"
    if cached.is_file():
        return Cubin(source, arch, cached.read_bytes())
    code = _run_nvrtc(source, options)
    _write_atomically(cached, code)
    return Cubin(source, arch, code)


def _run_nvrtc(source: str, options: tuple[str, ...]) -> bytes:
    nvrtc = _nvrtc()
    text = (_csrc() / source).read_bytes()
    program = _checked(nvrtc.nvrtcCreateProgram(text, source.encode(), 0, None, None))
    try:
        encoded = [option.encode() for option in options]
        (status,) = nvrtc.nvrtcCompileProgram(program, len(encoded), encoded)
        if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            log = bytearray(_checked(nvrtc.nvrtcGetProgramLogSize(program)))
            _checked(nvrtc.nvrtcGetProgramLog(program, log))
            message = bytes(log).rstrip(b"\0").decode(errors="replace").strip()
            raise CompileError(f"{source} does not compile with {' '.join(options)}: {message}")
        code = bytearray(_checked(nvrtc.nvrtcGetCUBINSize(program)))
        _checked(nvrtc.nvrtcGetCUBIN(program, code))
        return bytes(code)
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def _checked(answer: tuple[Any, ...]) -> Any:
    status, *values = answer
    if int(status) != 0:
        raise CompileError(f"NVRTC failed with {status}: see `flexq-bench doctor`")
    return values[0] if values else None


def _nvrtc() -> Any:
    try:
        from cuda.bindings import nvrtc

        nvrtc.nvrtcVersion()
    except (ImportError, RuntimeError) as error:
        raise UnsupportedError(
            "CUDA kernels need NVRTC: pip install 'flexq-bench[cuda13]' (or [cuda12])"
        ) from error
    return nvrtc


def _key(source: str, options: tuple[str, ...]) -> str:
    _, major, minor = _nvrtc().nvrtcVersion()
    # The include path is where the package lies, which must not decide what the code is.
    portable = [option for option in options if not option.startswith("--include-path")]
    text = "\0".join([sources_hash(), source, f"{major}.{minor}", *portable])
    return hashlib.sha256(text.encode()).hexdigest()


def _csrc() -> Path:
    return Path(str(resources.files("kernels"))) / "csrc"


def _cache_folder() -> Path:
    override = os.environ.get("FLEXQ_BENCH_CACHE")
    base = Path(override) if override else platformdirs.user_cache_path("flexq-bench")
    return base / "cubin"


def _write_atomically(path: Path, content: bytes) -> None:
    """Several workers may compile the same kernel at once: each sees a whole file or none."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as handle:
        handle.write(content)
    os.replace(handle.name, path)
