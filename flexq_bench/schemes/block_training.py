"""Training of a block's channel scales and weight clipping against the original block's outputs.

One trainer serves OmniQuant (arXiv 2308.13137: learnable weight clipping, section 3.2, and
learnable equivalent transformation, section 3.3) and ABQ-LLM (arXiv 2408.08554, section 3: the same
with its own losses, and a rank-one compensation of down_proj).

Two parts are left out. The channel-wise shift is disabled for LLaMA in both authors' codes. The
scale between query and key can't change a result here: it multiplies whole rows of their weights,
each of which has its own scale, and the products of attention are not quantized.

Neither method is in llm-compressor or optimum; both authors' codes replace whole model classes of
older transformers releases.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn
from torch.func import functional_call
from torch.nn import functional

from flexq_bench.kernels.formats import NumberFormat
from flexq_bench.schemes.calibration import BlockStream
from flexq_bench.schemes.channels import SiteInput
from flexq_bench.schemes.errors import QuantizeError
from flexq_bench.schemes.graphed_callable import GraphedCallable
from flexq_bench.schemes.losses import attention_divergence, double_log_cosine
from flexq_bench.schemes.smoothing import spread
from flexq_bench.schemes.straight_through import check_signed, fake_quantize

_SMALLEST_SCALE = 1e-2  # smallest scale of a channel, as in the published codes of both methods
_MAPS_ON_A_CPU = 2**30  # bytes


@dataclass(frozen=True, slots=True)
class TrainingOptions:
    """Options of block training; defaults are those of both papers (section 4.1 of each).

    epochs:            passes over the calibration segments for each block.
    scale_rate, clip_rate, compensation_rate: AdamW's learning rates, no weight decay. The papers
                       give no rate for the compensation; the default is that of ABQ-LLM's code.
    clip_start:        logit of the initial share of the range that codes span (98 %).
    loss:              "mse" of the outputs (OmniQuant), or "dlc+akl" (ABQ-LLM).
    """

    epochs: int = 20
    scale_rate: float = 5e-3
    clip_rate: float = 1e-2
    compensation_rate: float = 1e-2
    clip_start: float = 4.0
    loss: Literal["mse", "dlc+akl"] = "mse"


@dataclass(frozen=True, slots=True)
class Learned:
    """Learned scales, clipping and compensation of one block.

    scales:       of the source channels of each input, by the source's name within the block.
    clips:        clipped share of each group's range [N, groups], by name of the linear layer; for
                  weights with zero points [N, groups, 2], of the parts below and above 0.
    compensation: a [N, 1] and b [1, K] by name of the linear layer; W + a·b is rounded.
    losses:       mean loss of each epoch; index 0: before training.
    """

    scales: Mapping[str, torch.Tensor]
    clips: Mapping[str, torch.Tensor]
    compensation: Mapping[str, tuple[torch.Tensor, torch.Tensor]]
    losses: tuple[float, ...]


class BlockTrainer:
    """A block of nn.Linear layers in FP32, computed with scaled, clipped and rounded weights.

    linears:     kind of each linear layer, as in site_inputs, by its name within the block.
    weight:      format of the weights, integers; activation: of the inputs, signed; None:
                 weight-only.
    site_inputs: the inputs whose source can be divided by scales.
    start:       initial scales, by source; no scale is learned for other inputs.
    compensated: names of the linear layers that get a rank-one compensation.
    attention:   name of the attention module, whose second output is its map; None: none.

    Raises QuantizeError if the activations' format isn't signed.
    """

    def __init__(
        self,
        block: nn.Module,
        linears: Mapping[str, str],
        site_inputs: Sequence[SiteInput],
        weight: NumberFormat,
        activation: NumberFormat | None,
        start: Mapping[str, torch.Tensor],
        compensated: Sequence[str],
        options: TrainingOptions,
        *,
        attention: str | None = None,
    ) -> None:
        if activation is not None:
            check_signed(activation)
        self._block = block.requires_grad_(False)
        self._linears = dict(linears)
        self._site_inputs = tuple(
            site_input for site_input in site_inputs if site_input.source in start
        )
        self._weight, self._activation = weight, activation
        self._options = options
        self._attention = attention
        self._scales = {
            site_input.source: start[site_input.source].detach().clone().float().requires_grad_()
            for site_input in self._site_inputs
        }
        self._clips: dict[str, torch.Tensor] = {}
        self._compensation: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
        for name in self._linears:
            dense = block.get_submodule(name).weight
            assert isinstance(dense, torch.Tensor)
            n, k = dense.shape
            groups = 1 if weight.group is None else -(-k // weight.group)
            ends = (2,) if weight.has_zero_points else ()
            logits = torch.full((n, groups, *ends), options.clip_start, device=dense.device)
            self._clips[name] = logits.requires_grad_()
            if name in compensated:
                # Zeros, so that training starts from the unchanged weights.
                self._compensation[name] = (
                    torch.zeros((n, 1), device=dense.device).requires_grad_(),
                    torch.ones((1, k), device=dense.device).requires_grad_(),
                )

    def train(
        self,
        original: BlockStream,
        quantized: BlockStream,
        epoch_done: Callable[[int], None] = lambda epoch: None,
    ) -> Learned:
        """Train on the block's inputs in the original and in the quantized model, in their order.

        Both streams must be at this block. epoch_done: called after each epoch with its number.
        Training is deterministic: no random numbers are used.
        """
        with _tensor_cores(original.inputs[0].device):
            return self._train(original, quantized, epoch_done)

    def _train(
        self, original: BlockStream, quantized: BlockStream, epoch_done: Callable[[int], None]
    ) -> Learned:
        targets = self._targets(original, quantized)
        device = targets[0].here.device
        optimizer = self._optimizer(device)
        at = targets[0].copy()  # the current segment: each is copied here for its step
        total = torch.zeros((), device=device)  # read once per epoch: reading waits for the GPU

        def measure() -> None:
            with torch.no_grad():
                total.add_(self._loss(quantized, at))

        def step() -> None:
            optimizer.zero_grad()
            loss = self._loss(quantized, at)
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            with torch.no_grad():
                total.add_(loss)
                for scale in self._scales.values():
                    scale.clamp_(min=_SMALLEST_SCALE)

        def epoch(work: GraphedCallable) -> float:
            total.zero_()
            for target in targets:
                at.take(target)
                work()
            return float(total) / len(targets)

        losses = [epoch(GraphedCallable(measure, device))]
        steps = GraphedCallable(step, device, before_capture=lambda: _let_record(optimizer))
        for number in range(self._options.epochs):
            losses.append(epoch(steps))
            epoch_done(number + 1)
        return Learned(
            scales={name: scale.detach() for name, scale in self._scales.items()},
            clips={name: torch.sigmoid(clip).detach() for name, clip in self._clips.items()},
            compensation={
                name: (left.detach(), right.detach())
                for name, (left, right) in self._compensation.items()
            },
            losses=tuple(losses),
        )

    def _optimizer(self, device: torch.device) -> torch.optim.AdamW:
        options = self._options
        groups = [
            {"params": list(self._scales.values()), "lr": options.scale_rate},
            {"params": list(self._clips.values()), "lr": options.clip_rate},
            {
                "params": [side for pair in self._compensation.values() for side in pair],
                "lr": options.compensation_rate,
            },
        ]
        chosen = [group for group in groups if group["params"]]
        return torch.optim.AdamW(chosen, weight_decay=0.0, fused=device.type == "cuda")

    def _targets(self, original: BlockStream, quantized: BlockStream) -> list[_Target]:
        """Compute the inputs and outputs of the original block for each segment, in both models."""
        hidden = torch.empty_like(original.inputs[0], dtype=torch.float32)
        results: list[torch.Tensor] = []

        @torch.no_grad()
        def run() -> None:
            results[:] = self._run(quantized, {}, hidden, rounding=False)

        work = GraphedCallable(run, hidden.device)
        with_maps = self._options.loss != "mse"
        targets: list[_Target] = []
        for before, here in zip(original.inputs, quantized.inputs, strict=True):
            hidden.copy_(before)
            work()
            output, attention = results[0].clone(), None
            if with_maps and results[1] is None:  # in Falcon
                raise QuantizeError(
                    f"{type(self._block).__name__} gives no attention maps, which this scheme "
                    "trains on: take omniquant-wXaY"
                )
            if with_maps and not targets:
                room = _room_for_maps(hidden.device)
                with_maps = results[1].nbytes * len(original.inputs) <= room
            if with_maps:
                attention = results[1].clone()
            output_here = output
            if self._options.loss != "mse":
                hidden.copy_(here)
                work()
                output_here = results[0].clone()
            targets.append(_Target(before, here, output, output_here, attention))
        return targets

    def _loss(self, stream: BlockStream, target: _Target) -> torch.Tensor:
        output, attention = self._run(stream, self._tensors(), target.here, rounding=True)
        if self._options.loss == "mse":
            return functional.mse_loss(output, target.output)
        original = target.attention
        if original is None:
            with torch.no_grad():
                _, original = self._run(stream, {}, target.inputs, rounding=False)
        distance = double_log_cosine(output, target.output, target.output_here)
        return distance + attention_divergence(attention, original)

    def _tensors(self) -> dict[str, torch.Tensor]:
        """Return the block's norms and weights, scaled, compensated and rounded, differentiable."""
        tensors = {name: value.detach() for name, value in self._block.named_parameters()}
        for site_input in self._site_inputs:
            self._scale(tensors, site_input)
        for name in self._linears:
            weight = tensors[f"{name}.weight"]
            if name in self._compensation:
                left, right = self._compensation[name]
                weight = weight + left @ right
            shares = torch.sigmoid(self._clips[name])
            tensors[f"{name}.weight"] = fake_quantize(weight, self._weight, shares)
        return tensors

    def _scale(self, tensors: dict[str, torch.Tensor], site_input: SiteInput) -> None:
        s = self._scales[site_input.source]
        source = tensors[f"{site_input.source}.weight"]
        if site_input.through == "norm":
            source = (source + site_input.norm_offset) / s - site_input.norm_offset
        else:
            source = source / s[:, None]
        tensors[f"{site_input.source}.weight"] = source
        if f"{site_input.source}.bias" in tensors:
            tensors[f"{site_input.source}.bias"] = tensors[f"{site_input.source}.bias"] / s
        divisor = spread(s, site_input)
        for name, kind in self._linears.items():
            if kind in site_input.kinds:
                tensors[f"{name}.weight"] = tensors[f"{name}.weight"] * divisor

    def _run(
        self,
        stream: BlockStream,
        tensors: dict[str, torch.Tensor],
        hidden: torch.Tensor,
        *,
        rounding: bool,
    ) -> tuple[torch.Tensor, Any]:
        """Return the block's output with these weights, and its attention map (eager attention).

        None instead of the map: the block gives none.
        """
        maps: list[torch.Tensor] = []

        def block(states: torch.Tensor, **arguments: Any) -> Any:
            return functional_call(self._block, tensors, (states,), arguments)

        with self._hooks(maps, rounding):
            output = stream.run(block, hidden.float())
        return output, maps[0] if maps else None

    @contextlib.contextmanager
    def _hooks(self, maps: list[torch.Tensor], rounding: bool) -> Iterator[None]:
        handles = []

        def keep_map(_module: nn.Module, _inputs: Any, outputs: Any) -> None:
            if isinstance(outputs, tuple) and len(outputs) > 1:
                maps.append(outputs[1])

        last: list[torch.Tensor] = []  # query, key and value share an input; so do gate and up

        def round_input(_module: nn.Module, inputs: tuple[torch.Tensor, ...]) -> Any:
            assert self._activation is not None
            x = inputs[0]
            if not last or last[0] is not x:
                flat = x.reshape(-1, x.shape[-1])
                last[:] = x, fake_quantize(flat, self._activation).view_as(x)
            return (last[1], *inputs[1:])

        if self._attention is not None:
            attention = self._block.get_submodule(self._attention)
            handles.append(attention.register_forward_hook(keep_map))
        if rounding and self._activation is not None:
            handles += [
                self._block.get_submodule(name).register_forward_pre_hook(round_input)
                for name in self._linears
            ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


@contextlib.contextmanager
def _tensor_cores(device: torch.device) -> Iterator[None]:
    """Enable TF32 products during training on a GPU: as precise as FP16, as used by OmniQuant."""
    before = torch.get_float32_matmul_precision()
    if device.type == "cuda":
        torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def _let_record(optimizer: torch.optim.Optimizer) -> None:
    """Allow capture of the optimizer's step in a CUDA graph, without a warning outside of one."""
    for group in optimizer.param_groups:
        group["capturable"] = True


def _room_for_maps(device: torch.device) -> int:
    """Return the number of bytes that attention maps may use."""
    if device.type != "cuda":
        return _MAPS_ON_A_CPU
    free: int = torch.cuda.mem_get_info(device)[0]
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return (free + unused) // 4


@dataclass(frozen=True, slots=True)
class _Target:
    """A segment at a block: its inputs, and the target outputs.

    inputs, here: inputs of the block in the original and in the quantized model.
    output, output_here: outputs of the original block for these two inputs.
    attention: the original block's attention map; None: not needed, or recomputed each time,
    because the maps of all segments would not fit in memory.
    """

    inputs: torch.Tensor
    here: torch.Tensor
    output: torch.Tensor
    output_here: torch.Tensor
    attention: torch.Tensor | None

    def copy(self) -> _Target:
        tensors = (getattr(self, name) for name in self.__slots__)
        copies: list[Any] = [None if tensor is None else tensor.clone() for tensor in tensors]
        return _Target(*copies)

    def take(self, other: _Target) -> None:
        """Copy the values of another segment into the tensors of this one."""
        for name in self.__slots__:
            own, values = getattr(self, name), getattr(other, name)
            if own is not None and values is not None:
                own.copy_(values)
