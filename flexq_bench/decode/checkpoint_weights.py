"""Weights of a quantized checkpoint: its codes and scales, without further rounding."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from flexq_bench.checkpoints.checkpoint import QuantizedCheckpoint
from flexq_bench.checkpoints.model_source import check_no_more
from flexq_bench.decode.architecture import of_config
from flexq_bench.decode.model_weights import NamedWeights
from flexq_bench.errors import UsageError
from flexq_bench.kernels.decoder import KV_BITS
from flexq_bench.schemes.model_files import CONFIG
from flexq_bench.schemes.quantized_layer import QuantizedLayer


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
        unused = {*checkpoint.tensor_names}
        for layer in checkpoint.layers:
            unused |= {
                f"{layer}.weight",
                *([f"{layer}.bias"] if checkpoint.has_bias(layer) else []),
            }
        for tensor, bias, biased in self._expected():
            lacking = (
                tensor if tensor not in unused else bias if biased and bias not in unused else ""
            )
            if lacking:
                raise UsageError(
                    f"{name} has no tensor {lacking}: its {CONFIG} is of another model"
                )
            unused -= {tensor, bias}
        if self.architecture.dimensions.tied_embeddings:
            checkpoint.check_tied_head(f"{self._root}.embed_tokens.weight")
        check_no_more(name, unused)
        self._shapes = dict(self._dense_tensors())
        self._unbiased = {path for path, _, biased in self._layers() if not biased}

    def _expected(self) -> Iterator[tuple[str, str, bool]]:
        """Names of all tensors and of their biases, and True if the architecture has that bias."""
        yield from ((name, "", False) for name, _ in self._dense_tensors())
        for path, _, biased in self._layers():
            yield f"{path}.weight", f"{path}.bias", biased

    def _layer(self, name: str, shape: tuple[int, int], device: torch.device) -> QuantizedLayer:
        if name in self._quantized:
            layer = self._checkpoint.layer(name, device)
        else:
            layer = super()._layer(name, shape, device)
        self._check_shape(name, (layer.weight.rows, layer.weight.k), shape)
        if name in self._unbiased and layer.bias is not None and bool(layer.bias.any()):
            raise UsageError(
                f"{self.architecture.dimensions.name}: {name} has a bias, which its architecture "
                "ignores: quantize it again"
            )
        return layer

    def fp8_scales(self, index: int) -> torch.Tensor | None:
        of_block = self._checkpoint.fp8_cache_scales(index)
        if of_block is None:
            return None
        return of_block.expand(2, self.architecture.dimensions.kv_heads).contiguous()

    def _tensor(self, name: str) -> torch.Tensor:
        tensor = self._checkpoint.tensor(name)
        shape = self._shapes.get(name, tuple(tensor.shape))
        self._check_shape(name, tuple(tensor.shape), shape)
        return tensor

    def _check_shape(self, name: str, shape: tuple[int, ...], expected: tuple[int, ...]) -> None:
        if shape != expected:
            raise UsageError(
                f"{self.architecture.dimensions.name}: {name} is {list(shape)}, its {CONFIG} asks "
                f"for {list(expected)}: quantize it again"
            )
