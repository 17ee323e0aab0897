"""Compilation of CUDA sources by NVRTC, with a cache on disk. Needs no GPU and no driver."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from flexq_bench.kernels.errors import CompileError, UnsupportedError
from flexq_bench.kernels.runtime.files import cache_folder, only_process, write_atomically
from flexq_bench.kernels.runtime.sources import source_hash

COMMON_OPTIONS = ("--std=c++17",)
_TRAILER_BYTES = 32

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Block:
    """Launch parameters of one function that determine its occupancy.

    shared_bytes: dynamic shared memory, without the function's static shared memory.
    """

    function: str
    threads: int
    shared_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Build:
    """A source in kernels/csrc with its `-D` defines.

    min_sm: first supported architecture, 80 for sm_80. only_sm: the only supported one, for sources
    with architecture-specific instructions (90: sm_90a); None: all from min_sm on.
    block: launch parameters of its main function; None: not determined by the defines.
    """

    source: str
    defines: tuple[tuple[str, int], ...] = ()
    min_sm: int = 80
    block: Block | None = field(default=None, compare=False)
    only_sm: int | None = None

    @classmethod
    def of(
        cls,
        source: str,
        *,
        min_sm: int = 80,
        block: Block | None = None,
        only_sm: int | None = None,
        **defines: int,
    ) -> Build:
        return cls(source, tuple(sorted(defines.items())), min_sm, block, only_sm)

    def runs_on(self, arch: str) -> bool:
        """Return True if the build compiles for an architecture, for example "sm_86"."""
        sm = int(arch.removeprefix("sm_"))
        return sm >= self.min_sm if self.only_sm is None else sm == self.only_sm

    @property
    def name(self) -> str:
        """Readable name, for example `btc/gemm.cu A_BITS=6 STAGES=4`."""
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


@cache
def builds_hash(builds: Sequence[Build]) -> str:
    """SHA-256 over the sources of builds and all files that they include."""
    hashes = [source_hash(_csrc(), name) for name in sorted({build.source for build in builds})]
    return hashlib.sha256("".join(hashes).encode()).hexdigest()


@cache
def compile_build(build: Build, arch: str) -> Cubin:
    """Compile a build for arch (for example "sm_90"), or read it from the cache.

    Raises CompileError with NVRTC's log, UnsupportedError if NVRTC isn't installed.
    """
    source = build.source
    options = (
        f"--gpu-architecture={arch}{'' if build.only_sm is None else 'a'}",
        *COMMON_OPTIONS,
        f"--include-path={_csrc()}",
        *(f"--define-macro={name}={value}" for name, value in build.defines),
    )
    key = _key(source, options)
    cached = cache_folder() / "cubin" / f"{key}.cubin"
    code = _cached(cached, key)
    if code is None:
        # Workers on one machine start with the same kernels: the first compiles for all of them.
        with only_process(cache_folder() / "compiling" / f"{key}.lock"):
            code = _cached(cached, key)
            if code is None:
                code = _run_nvrtc((_csrc() / source).read_bytes(), source, options)
                write_atomically(cached, code + _trailer(key, code))
    return Cubin(source, arch, code)


@cache
def compiler_version() -> str:
    """Return NVRTC's version, for example "13.0". Raises UnsupportedError if not installed."""
    _, major, minor = _nvrtc().nvrtcVersion()
    return f"{major}.{minor}"


def _cached(path: Path, key: str) -> bytes | None:
    """Read machine code from the cache; None: there is no readable file, or its hash differs."""
    try:
        content = path.read_bytes()
    except OSError:
        return None
    code, trailer = content[:-_TRAILER_BYTES], content[-_TRAILER_BYTES:]
    if code and trailer == _trailer(key, code):
        return code
    log.warning("%s is damaged or another build's: compiling it again", path)
    return None


def _trailer(key: str, code: bytes) -> bytes:
    """Return the trailer of a cache file: a hash of the build and its machine code."""
    return hashlib.sha256(key.encode() + code).digest()


def compile_cuda(
    text: str, target: str, options: Sequence[str] = COMMON_OPTIONS, *, name: str = "kernel.cu"
) -> bytes:
    """Compile CUDA C++ to a cubin for an architecture (for example "sm_90"), without a cache.

    name: file name in messages. Raises CompileError and UnsupportedError as `compile_build`.
    """
    return _run_nvrtc(text.encode(), name, (f"--gpu-architecture={target}", *options))


def _run_nvrtc(text: bytes, source: str, options: tuple[str, ...]) -> bytes:
    nvrtc = _nvrtc()
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


def _checked(result: tuple[Any, ...]) -> Any:
    status, *values = result
    if int(status) != 0:
        raise CompileError(f"NVRTC failed with {status}: see `flexq-bench doctor`")
    return values[0] if values else None


def _nvrtc() -> Any:
    try:
        from cuda.bindings import nvrtc

        nvrtc.nvrtcVersion()
    except (ImportError, RuntimeError) as error:
        raise UnsupportedError(
            "CUDA kernels need NVRTC: pip install 'flexq-bench[cuda13]' (or [cuda12]; without a "
            "GPU, [static])"
        ) from error
    return nvrtc


def _key(source: str, options: tuple[str, ...]) -> str:
    # The include path depends on where the package is installed, the machine code does not.
    portable = [option for option in options if not option.startswith("--include-path")]
    text = "\0".join([source_hash(_csrc(), source), source, compiler_version(), *portable])
    return hashlib.sha256(text.encode()).hexdigest()


def _csrc() -> Path:
    return Path(str(resources.files("flexq_bench"))) / "kernels" / "csrc"
