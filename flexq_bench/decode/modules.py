"""Decoding by transformers' own modules, with linear layers by kernels.

For every model that `decoder` has no forward pass for: attention with soft-caps, windows, sinks or
latent keys, any rotary embedding, state-space layers. Experts are computed one after another. The
modules run from Python, so launch overhead counts here, and no step is a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from torch import nn

from flexq_bench.checkpoints.checkpoint import QuantizedCheckpoint
from flexq_bench.checkpoints.config import DENSE_KV_BITS
from flexq_bench.checkpoints.model_source import auto_class, quiet_transformers, read_config
from flexq_bench.checkpoints.streaming import config_of
from flexq_bench.decode.engine import Generation, check_length
from flexq_bench.decode.kernel_linear import ActivationBuffers, KernelLinear
from flexq_bench.decode.loading import RESERVE_BYTES, Footprint, packed_bytes
from flexq_bench.decode.stopwatch import Stopwatch
from flexq_bench.decode.stored_modules import fill, unfilled_model
from flexq_bench.errors import UsageError, library_reason
from flexq_bench.kernels.decoder import KV_BITS
from flexq_bench.schemes.model_files import ModelFiles

_HALF = torch.float16


@dataclass(frozen=True, slots=True)
class ModuleModel:
    """A transformers model on a device, in evaluation mode.

    name: of the model. vocab: rows of its embedding. context: positions; None: not limited.
    """

    name: str
    module: Any
    vocab: int
    context: int | None

    @property
    def device(self) -> torch.device:
        device: torch.device = self.module.get_input_embeddings().weight.device
        return device

    def kernels(self) -> dict[str, str]:
        """Kernel labels of linear layers by their last names; comma-separated if they differ."""
        labels: dict[str, list[str]] = {}
        for name, module in self.module.named_modules():
            if isinstance(module, KernelLinear):
                labels.setdefault(name.rpartition(".")[2], []).append(module.kernel.spec.label)
            elif isinstance(module, nn.Linear):
                labels.setdefault(name.rpartition(".")[2], []).append("torch")
        return {name: ",".join(dict.fromkeys(own)) for name, own in labels.items()}

    @property
    def nbytes(self) -> int:
        """Bytes of all weights: unquantized tensors, and packed codes."""
        tensors = {id(t): t.numel() * t.element_size() for t in self.module.parameters()}
        packed: list[int] = [
            packed_bytes(m.out_features, m.in_features, m.layer.weight_format)
            for m in self.module.modules()
            if isinstance(m, KernelLinear)
        ]
        return int(sum(tensors.values())) + sum(packed)


class ModuleWeights:
    """Weights of a checkpoint, or of a folder without quantization, for transformers' modules.

    Raises UsageError if transformers can't build the model.
    """

    is_synthetic = False

    def __init__(self, source: QuantizedCheckpoint | ModelFiles) -> None:
        self._source = source
        if isinstance(source, QuantizedCheckpoint):
            self.name = source.model_name
            self.content_hashes = {bits: source.hash_with_cache(bits) for bits in KV_BITS}
            self.scheme_version: int | None = source.scheme.version
            describe: Callable[[], Any] = partial(config_of, source.config)
        else:
            self.name = source.name
            self.content_hashes = dict.fromkeys(KV_BITS, source.content_hash())
            self.scheme_version = None
            describe = partial(read_config, source)
        try:
            self._config = describe()
        except Exception as error:  # of any class, for example an unknown model type
            raise UsageError(f"can't load {self.name}: {library_reason(error)}") from error
        self._text = self._config.get_text_config(decoder=True)

    @property
    def context(self) -> int | None:
        """Positions of the model; None: not limited."""
        positions = getattr(self._text, "max_position_embeddings", None)
        return int(positions) if positions else None

    def footprint(self, batch: int, capacity: int) -> Footprint:
        """Estimate the device memory. Keys and values have the width of the hidden states at most;
        those of few bits are stored as the numbers that they stand for.
        """
        source = self._source
        if isinstance(source, QuantizedCheckpoint):
            weights = sum(path.stat().st_size for path in source.folder.glob("*.safetensors"))
        else:
            weights = sum(path.stat().st_size for path in source.weights)
        blocks = int(getattr(self._text, "num_hidden_layers", 1))
        cache = 2 * blocks * int(self._text.hidden_size) * capacity * batch * _HALF.itemsize
        return Footprint(weights, cache, RESERVE_BYTES)

    def load(self, device: torch.device) -> ModuleModel:
        """Load the model. Raises CheckpointError for damaged weights, QuantizeError for a layer
        without a kernel.
        """
        source = self._source
        with quiet_transformers():
            if isinstance(source, QuantizedCheckpoint):
                module = unfilled_model(source, _HALF)
                buffers = ActivationBuffers()
                fill(module, source, device, partial(KernelLinear, buffers=buffers))
                if (scales := source.fp8_cache_scales_of_blocks()) is not None:
                    from flexq_bench.decode.quantized_cache import quantize_cache

                    quantize_cache(module, DENSE_KV_BITS, scales)
            else:
                module = _unquantized(source, self._config).to(device).eval()
        rows = int(module.get_input_embeddings().weight.shape[0])
        return ModuleModel(self.name, module, rows, self.context)


def _unquantized(files: ModelFiles, config: Any) -> Any:
    try:
        return auto_class(config).from_pretrained(
            files.folder, dtype=_HALF, trust_remote_code=False, use_safetensors=True
        )
    except Exception as error:  # of any class: weights that don't fit
        raise UsageError(f"can't load {files.name}: {library_reason(error)}") from error


class ModuleEngine:
    """Greedy decoding by transformers' modules. capacity: tokens of a sequence, prompt included."""

    def __init__(self, model: ModuleModel, *, capacity: int, kv_bits: int = 16) -> None:
        self.model = model
        self.capacity = capacity
        self._kv_bits = kv_bits
        self._cache: Any = None

    @torch.inference_mode()
    def generate(
        self,
        prompts: torch.Tensor,
        new: int,
        on_pass: Callable[[int, torch.Tensor], None] = lambda position, logits: None,
    ) -> Generation:
        """Decode `new` tokens after prompts int32 [B, T]; see Engine.generate."""
        length = prompts.shape[1]
        check_length(length, new, self.capacity)
        watch = Stopwatch(self.model.device)
        watch.mark()
        self._begin()
        logits = self.more(prompts)
        on_pass(length, logits)
        watch.mark()
        tokens = [logits.argmax(dim=1)]
        for position in range(length + 1, length + new):
            logits = self.more(tokens[-1][:, None])
            on_pass(position, logits)
            tokens.append(logits.argmax(dim=1))
            watch.mark()
        prefill, *steps = watch.intervals_ms()
        return Generation(torch.stack(tokens, dim=1), prefill, tuple(steps))

    @torch.inference_mode()
    def logits(self, prompts: torch.Tensor) -> torch.Tensor:
        """Logits [B, T, vocab] at every position of prompts int32 [B, T]."""
        self._begin()
        return self._forward(prompts.long()).logits  # type: ignore[no-any-return]

    def _begin(self) -> None:
        self._cache = None
        if self._kv_bits != DENSE_KV_BITS:
            from flexq_bench.decode.quantized_cache import QuantizedCache  # imports transformers

            self._cache = QuantizedCache(self.model.module.config, self._kv_bits)

    @torch.inference_mode()
    def more(self, ids: torch.Tensor) -> torch.Tensor:
        """Logits [B, vocab] after more tokens [B, T] of each sequence."""
        last: torch.Tensor = self._forward(ids.long()).logits[:, -1]
        return last

    def _forward(self, ids: torch.Tensor) -> Any:
        output = self.model.module(input_ids=ids, use_cache=True, **{self._cache_name: self._cache})
        self._cache = getattr(output, self._cache_name, None)
        if self._cache is None:  # RecurrentGemma
            raise UsageError(f"{self.model.name} keeps its state in its modules: pick another")
        return output

    @cached_property
    def _cache_name(self) -> str:
        """The argument in which the model takes what it keeps of earlier tokens."""
        import inspect

        known = inspect.signature(self.model.module.forward).parameters
        names = ("past_key_values", "cache_params", "state", "mems")
        name = next((name for name in names if name in known), None)
        if name is None:
            raise UsageError(f"{self.model.name} keeps no state of earlier tokens: pick another")
        return name
