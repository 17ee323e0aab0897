"""Weights of a quantized checkpoint: its codes and scales, without further rounding."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch

from flexq_bench.checkpoints import QuantizedCheckpoint, open_checkpoint
from flexq_bench.checkpoints.model_source import check_no_more
from flexq_bench.decode.architecture import of_config
from flexq_bench.decode.model_weights import NamedWeights
from flexq_bench.decode.weights import dense_layer
from flexq_bench.errors import UsageError
from flexq_bench.schemes.layer_formats import LayerFormats
from flexq_bench.schemes.model_files import CONFIG
from flexq_bench.schemes.quantized_layer import QuantizedLayer
from kernels.decoder import KV_BITS

_CPU = torch.device("cpu")


class CheckpointWeights(NamedWeights):
    """Reads layers on demand. Layers that are dense in the checkpoint are FP16.

    Raises UsageError if weights are missing, or decode does not support the model.
    """

    def __init__(self, checkpoint: QuantizedCheckpoint) -> None:
        name = checkpoint.model_name
        super().__init__(of_config(checkpoint.config, name), checkpoint.tensor_names)
        self.content_hashes = {bits: checkpoint.hash_with_cache(bits) for bits in KV_BITS}
        self.scheme_version = checkpoint.scheme.version
        self.is_synthetic = checkpoint.is_synthetic
        self._checkpoint = checkpoint
        self._quantized = frozenset(checkpoint.layers)
        left = {*checkpoint.tensor_names, *(f"{path}.weight" for path in checkpoint.layers)}
        for tensor, bias in self._expected():
            if tensor not in left:
                raise UsageError(f"{name} has no tensor {tensor}: its {CONFIG} is of another model")
            left -= {tensor, bias}
        check_no_more(name, left)

    def _expected(self) -> Iterator[tuple[str, str]]:
        """Names of all tensors of the architecture and of their optional biases."""
        yield from ((name, "") for name, _ in self._dense_tensors())
        yield from ((f"{path}.weight", f"{path}.bias") for path, _, _ in self._layers())

    def formats(self) -> dict[str, LayerFormats]:
        layers = self.block(0, _CPU).linears
        return {name: layer.formats for name, layer in layers.items()}

    def _layer(self, name: str, shape: tuple[int, int], device: torch.device) -> QuantizedLayer:
        if name in self._quantized:
            layer = self._checkpoint.layer(name, device)
        else:
            biased = f"{name}.bias" in self._checkpoint.tensor_names
            layer = dense_layer(
                self._load(f"{name}.weight", device),
                self._load(f"{name}.bias", device) if biased else None,
            )
        given = layer.weight.rows, layer.weight.k
        if given != shape:
            raise UsageError(
                f"{self.architecture.dimensions.name}: {name} is {list(given)}, its {CONFIG} asks "
                f"for {list(shape)}: quantize it again"
            )
        return layer

    def _tensor(self, name: str) -> torch.Tensor:
        return self._checkpoint.tensor(name)


def checkpoint_weights(path: Path) -> CheckpointWeights:
    """Open the weights of a checkpoint folder. Raises UsageError as CheckpointWeights."""
    return CheckpointWeights(open_checkpoint(path))
