"""A Hugging Face model of which one block is in memory, so that any model can be quantized.

The model is built without its weights. A block's weights are read when a forward pass enters it or
when they are asked for, and dropped when another block's are; a block that was quantized is dropped
when it was written. Embeddings, final norm and output head are read once, if anything is to be run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from flexq_bench.checkpoints.errors import CheckpointError
from flexq_bench.checkpoints.layers import all_finite
from flexq_bench.checkpoints.model_source import (
    ModelSource,
    expected_tensors,
    quiet_transformers,
)
from flexq_bench.checkpoints.peak_memory import give_back_free_memory
from flexq_bench.errors import library_reason
from flexq_bench.schemes.fake_quantization import FakeQuantizedLinear
from flexq_bench.schemes.linear_layers import linear_origins
from flexq_bench.schemes.model_map import ModelMap, map_model

_META = torch.device("meta")


class StreamedModel:
    """A model on a device whose blocks come and go.

    module: the transformers model. layout: its map. dtype: that schemes see its weights in.
    is_separated: some of its linear layers are packed otherwise in transformers.
    Raises CheckpointError if the source lacks tensors of it, and QuantizeError without a map.
    """

    def __init__(self, source: ModelSource, device: torch.device, dtype: torch.dtype) -> None:
        self._source, self._device, self._dtype = source, device, dtype
        self.module: Any = without_weights(source).eval()
        _drop_weights(self.module)  # those of norms were made
        origins = linear_origins(self.module)
        self.is_separated = bool(origins)
        self.layout: ModelMap = map_model(self.module)
        source.bind(self.module, origins)
        prefix = f"{self.layout.names.blocks}."
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
        """The module of a block, in memory or not."""
        return self.layout.block_module(self.module, index)

    def enter(self, index: int) -> None:
        """Have a block's weights in memory, and no other's."""
        if index == self._resident:
            return
        if self._resident is not None:
            self.leave(self._resident)
        self._fill(self._of_block[index])
        self._resident = index

    def leave(self, index: int) -> None:
        """Drop a block, with what was done to it."""
        _drop_weights(self.block(index))
        self._resident = None
        give_back_free_memory()

    def load_ends(self) -> None:
        """Read what is no block: a forward pass needs it."""
        self._fill(self.ends)
        self.module.tie_weights()

    def read_ends(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The tensors that belong to no block, as they are stored, one at a time."""
        return self._source.read_halves(self.ends, self._device)

    def changed_ends(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The same as they are in memory, after a scheme changed them, as FP16."""
        prefix = f"{self.layout.names.blocks}."
        state = self.module.state_dict()
        names = [name for name in expected_tensors(self.module) if not name.startswith(prefix)]
        return ((name, state[name].to(torch.float16)) for name in names)

    @contextmanager
    def streamed(self) -> Iterator[None]:
        """While it lasts, a forward pass that enters a block brings its weights."""

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
            values = tensor.to(self._dtype)
            if not all_finite(values):
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
        """Buffers that are computed, such as the rotary frequencies, to the device."""
        for module in self.module.modules():
            for name, buffer in module._buffers.items():
                if buffer is not None and buffer.device != _META:
                    module._buffers[name] = buffer.to(self._device)


def _drop_weights(module: nn.Module) -> None:
    """Parameters to the meta device, and codes; buffers that were computed stay."""
    for part in module.modules():
        if isinstance(part, FakeQuantizedLinear):
            part.to(_META)
        for name, parameter in part._parameters.items():
            if parameter is not None:
                part._parameters[name] = nn.Parameter(parameter.to(_META))


class EmptyOnMeta(TorchFunctionMode):
    """Tensors that a layer would fill with weights take no memory; what is computed is computed."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        given = dict(kwargs or {})
        if func is torch.empty:
            given["device"] = _META
        return func(*args, **given)


def without_weights(source: ModelSource) -> Any:
    """A model as its source's configuration says, on the meta device. Raises CheckpointError."""
    from transformers import AutoModelForCausalLM

    config = source.config()
    try:
        with quiet_transformers(), EmptyOnMeta():
            return AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    except Exception as error:  # from a wrong configuration to an unknown architecture
        raise CheckpointError(f"can't load {source.name}: {library_reason(error)}") from error
