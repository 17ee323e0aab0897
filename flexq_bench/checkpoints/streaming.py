"""A Hugging Face model with one block in memory at a time, so that any model can be quantized.

The model is built without its weights. A block's weights are read when a forward pass enters it or
when they are requested, and dropped when those of another block are read; a quantized block is
dropped after it was written. Embeddings, final norm and output head are read once, if a forward
pass is needed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from flexq_bench.checkpoints.errors import CheckpointError
from flexq_bench.checkpoints.layers import is_finite_or_bound
from flexq_bench.checkpoints.model_source import (
    ModelSource,
    auto_class,
    expected_tensors,
    quiet_transformers,
)
from flexq_bench.checkpoints.peak_memory import release_free_memory
from flexq_bench.errors import library_reason
from flexq_bench.schemes.fake_quantization import FakeQuantizedLinear
from flexq_bench.schemes.linear_layers import linear_origins
from flexq_bench.schemes.model_map import ModelMap, map_model
from flexq_bench.schemes.strict_json import decode_numbers

_META = torch.device("meta")


class StreamedModel:
    """A model on a device whose blocks are loaded and dropped one by one.

    module: the transformers model. layout: its map. dtype: of the weights for schemes.
    is_separated: some of its linear layers have another form in transformers. Raises
    CheckpointError if the source lacks tensors, and QuantizeError for a model without a map.
    """

    def __init__(self, source: ModelSource, device: torch.device, dtype: torch.dtype) -> None:
        self._source, self._device, self._dtype = source, device, dtype
        self.module: Any = without_weights(source).eval()
        _drop_weights(self.module)  # those of norms were created
        origins = linear_origins(self.module)
        self.is_separated = bool(origins)
        self.layout: ModelMap = map_model(self.module)
        source.bind(self.module, origins)
        prefix = f"{self.layout.path}."
        self._of_block: dict[int, list[str]] = {index: [] for index in range(self.layout.blocks)}
        self.ends: list[str] = []
        for name in expected_tensors(self.module):
            if name.startswith(prefix):
                self._of_block[int(name.removeprefix(prefix).partition(".")[0])].append(name)
            else:
                self.ends.append(name)
        self._module_to_device()
        self._resident: int | None = None

    def block(self, index: int) -> nn.Module:
        """The module of a block, whether its weights are in memory or not."""
        return self.layout.block_module(self.module, index)

    def keeps_fp32(self, name: str) -> bool:
        """Return True for tensors that transformers never converts: biases that choose experts."""
        parts = getattr(self.module, "_keep_in_fp32_modules_strict", None) or ()
        return any(part in name for part in parts)

    def enter(self, index: int) -> None:
        """Load a block's weights, and drop those of all others."""
        if index == self._resident:
            return
        if self._resident is not None:
            self.leave(self._resident)
        self._fill(self._of_block[index])
        self._resident = index

    def leave(self, index: int) -> None:
        """Drop a block, including changes to it."""
        _drop_weights(self.block(index))
        self._resident = None
        release_free_memory()

    def load_ends(self) -> None:
        """Load the tensors outside the blocks, which a forward pass needs."""
        self._fill(self.ends)
        self.module.tie_weights()

    def read_ends(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The tensors outside the blocks, as stored, one at a time."""
        return self._source.read_halves(self.ends, self._device)

    def changed_ends(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The same as changed by a scheme in memory, as FP16."""
        prefix = f"{self.layout.path}."
        state = self.module.state_dict()
        names = [name for name in expected_tensors(self.module) if not name.startswith(prefix)]
        return ((name, state[name].to(torch.float16)) for name in names)

    @contextmanager
    def streamed(self) -> Iterator[None]:
        """Context in which a forward pass loads the weights of each block that it enters."""

        def bring(index: int) -> Callable[[nn.Module, tuple[Any, ...]], None]:
            return lambda module, arguments: self.enter(index)

        handles = [
            self.block(index).register_forward_pre_hook(bring(index))
            for index in range(self.layout.blocks)
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _fill(self, names: Iterable[str]) -> None:
        for name, tensor in self._source.read(names, self._device):
            values = tensor.to(torch.float32 if self.keeps_fp32(name) else self._dtype)
            if not is_finite_or_bound(values):
                raise CheckpointError(
                    f"{self._source.name}: {name} holds NaN or infinity in "
                    f"{str(self._dtype).removeprefix('torch.')}: download the model again, or take "
                    "a --dtype of more range"
                )
            path, _, leaf = name.rpartition(".")
            owner = self.module.get_submodule(path)
            if leaf in owner._parameters:
                owner._parameters[leaf] = nn.Parameter(values)
            else:
                owner._buffers[leaf] = values

    def _module_to_device(self) -> None:
        """Move computed buffers, such as the rotary frequencies, to the device."""
        for module in self.module.modules():
            for name, buffer in module._buffers.items():
                if buffer is not None and buffer.device != _META:
                    module._buffers[name] = buffer.to(self._device)


def _drop_weights(module: nn.Module) -> None:
    """Move parameters and codes to the meta device; computed buffers stay."""
    for part in module.modules():
        if isinstance(part, FakeQuantizedLinear):
            part.to(_META)
        for name, parameter in part._parameters.items():
            if parameter is not None:
                part._parameters[name] = nn.Parameter(parameter.to(_META))


class EmptyOnMeta(TorchFunctionMode):
    """Context in which parameters of new layers take no memory; computed tensors are computed."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        arguments = dict(kwargs or {})
        if func is torch.empty:
            arguments["device"] = _META
        return func(*args, **arguments)


def model_on_meta(config: Any, dtype: torch.dtype | None = None) -> Any:
    """A model of a configuration; matrices are on the meta device, computed buffers are not.

    dtype: of the model; None: the configuration's. Raises any exception for an invalid one.
    """
    keywords = {} if dtype is None else {"dtype": dtype}
    with quiet_transformers(), EmptyOnMeta():
        of_config = auto_class(config)
        if hasattr(of_config, "from_config"):
            return of_config.from_config(config, trust_remote_code=False, **keywords)
        return of_config._from_config(config, **keywords)  # a decoder's own class


def config_of(described: Mapping[str, Any]) -> Any:
    """The transformers configuration of a parsed config.json. Raises any exception."""
    from transformers import AutoConfig

    values = decode_numbers(dict(described))
    return AutoConfig.for_model(values.pop("model_type"), **values)


def without_weights(source: ModelSource) -> Any:
    """A model of its source's configuration, on the meta device. Raises CheckpointError."""
    config = source.config()
    try:
        return model_on_meta(config)
    # any exception, from a wrong configuration to an unknown architecture
    except Exception as error:
        raise CheckpointError(f"can't load {source.name}: {library_reason(error)}") from error
