"""Loaded machine code: functions that launch on torch's current stream."""

from __future__ import annotations

import ctypes
import hashlib
import os
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cache
from typing import Any

import torch

from flexq_bench.kernels.errors import KernelError, UnsupportedError
from flexq_bench.kernels.runtime.gpu import current_gpu, present_gpu
from flexq_bench.kernels.runtime.nvrtc import Build, Cubin, compile_build
from flexq_bench.kernels.runtime.tensor_map import TensorMap

# More dynamic shared memory than this requires a function attribute.
_DEFAULT_SHARED_BYTES = 48 * 1024
Argument = torch.Tensor | TensorMap | int | float | None


class CudaFunction:
    """One __global__ function of a cubin, loaded in the current device's context."""

    def __init__(self, cubin: Cubin, name: str) -> None:
        self.cubin = cubin
        self.name = name
        self._module = _load(cubin)
        self._function = self._module.get_function(name)
        self._shared_allowed = _DEFAULT_SHARED_BYTES

    def launch(
        self,
        grid: tuple[int, int, int],
        threads: int,
        arguments: Sequence[Argument],
        *,
        shared_bytes: int = 0,
        overlap_previous: bool = False,
        cluster: int = 1,
    ) -> None:
        """Enqueue on torch's current stream.

        arguments: tensors are passed as pointers, None as a null pointer, ints as int32, floats as
        float32, tensor maps by value.
        overlap_previous: programmatic dependent launch (compute capability 9.0 and later): the
        kernel may start before the previous one in the stream has ended, and must execute
        griddepcontrol.wait before it accesses the previous kernel's results.
        cluster: consecutive blocks along x that form a thread block cluster (9.0 and later).
        Raises KernelError if the driver refuses the launch.
        """
        from cuda.bindings import driver

        if shared_bytes > self._shared_allowed:
            attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            _check(
                driver.cuFuncSetAttribute(self._function.ptr, attribute, shared_bytes), self.name
            )
            self._shared_allowed = shared_bytes
        config = driver.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = grid
        config.blockDimX, config.blockDimY, config.blockDimZ = threads, 1, 1
        config.sharedMemBytes = shared_bytes
        config.hStream = torch.cuda.current_stream().cuda_stream
        attributes = []
        identifiers = driver.CUlaunchAttributeID
        if overlap_previous and int(self.cubin.arch.removeprefix("sm_")) >= 90:
            attribute = driver.CUlaunchAttribute()
            attribute.id = identifiers.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
            attribute.value.programmaticStreamSerializationAllowed = 1
            attributes.append(attribute)
        if cluster > 1:
            attribute = driver.CUlaunchAttribute()
            attribute.id = identifiers.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
            attribute.value.clusterDim.x = cluster
            attribute.value.clusterDim.y = attribute.value.clusterDim.z = 1
            attributes.append(attribute)
        config.attrs = attributes
        config.numAttrs = len(attributes)
        values = [_as_ctype(argument) for argument in arguments]
        pointers = (ctypes.c_void_p * len(values))(*(ctypes.addressof(v) for v in values))
        status = driver.cuLaunchKernelEx(config, self._function.ptr, ctypes.addressof(pointers), 0)
        _check(status, self.name)


def load_function(build: Build, name: str) -> CudaFunction:
    """Return function `name` of a build, compiled for and loaded on the current device; cached."""
    return _loaded(build, name, torch.cuda.current_device())


def binary_hash(builds: Sequence[Build]) -> str | None:
    """SHA-256 over the machine code of builds on the current device; None: there are none."""
    if not builds:
        return None
    hashes = sorted(compile_build(build, current_gpu().arch).hash for build in builds)
    return hashlib.sha256("".join(hashes).encode()).hexdigest()


def compile_ahead(builds: Iterable[Build]) -> None:
    """Compile builds that are not cached for the current device, on several threads.

    NVRTC's later phases run in parallel. Compile errors are raised when a build is loaded.
    """
    distinct = list(dict.fromkeys(builds))
    if not distinct:
        return
    arch = current_gpu().arch
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for compiled in [pool.submit(compile_build, build, arch) for build in distinct]:
            with suppress(KernelError):
                compiled.result()


@cache
def _loaded(build: Build, name: str, device: int) -> CudaFunction:
    return CudaFunction(compile_build(build, present_gpu(device).arch), name)


def _load(cubin: Cubin) -> Any:
    try:
        import cupy
    except ImportError as error:
        raise UnsupportedError(
            "CUDA kernels need CuPy: pip install 'flexq-bench[cuda13]' (or [cuda12])"
        ) from error
    torch.cuda.current_stream()  # makes torch's context current, which CuPy then shares
    module = cupy.cuda.function.Module()
    module.load(cubin.code)
    return module


def _check(result: tuple[Any, ...], name: str) -> None:
    if int(result[0]) != 0:
        raise KernelError(f"{name} failed with {result[0]}")


def _as_ctype(argument: Argument) -> Any:
    if isinstance(argument, torch.Tensor):
        return ctypes.c_void_p(argument.data_ptr())
    if isinstance(argument, TensorMap):
        return (ctypes.c_uint64 * len(argument.words))(*argument.words)
    if argument is None:
        return ctypes.c_void_p(0)
    if isinstance(argument, float):
        return ctypes.c_float(argument)
    return ctypes.c_int32(argument)
