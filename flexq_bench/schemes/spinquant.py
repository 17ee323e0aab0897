"""SpinQuant: QuaRot with a learned rotation of the residual stream.

Liu et al., arXiv 2405.16406, section 3.2: the rotation is learned on the manifold of orthogonal
matrices by steps along Cayley transforms (Li et al., arXiv 2002.01113, algorithm 1), from QuaRot's
Hadamard matrix on, at a rate that falls linearly to 0.

Differences: the loss is not that of the whole network, whose blocks are never in memory together,
but the mean relative squared error of the products of inputs and weights, both rounded, on a sample
of tokens and output channels of all layers that read the stream; the best step on this sample is
kept, so the result is no worse on it than QuaRot's. Rotations within heads (R2) are not learned.
Others as of `quarot`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from flexq_bench.schemes.model_map import linear_at, weight_of
from flexq_bench.schemes.quarot import QuaRot, QuaRotOptions
from flexq_bench.schemes.rotation import MatrixRotation, Rotation
from flexq_bench.schemes.scheme import QuantizationState
from flexq_bench.schemes.site_inputs import readers_of
from flexq_bench.schemes.straight_through import fake_quantize

_TOKENS, _ROWS = 128, 256  # of a sample: of a layer's inputs, and of its output channels


@dataclass(frozen=True, slots=True)
class SpinQuantOptions(QuaRotOptions):
    """steps: of the descent; 0: QuaRot's matrix. rate: Frobenius norm of the first step."""

    steps: int = 100
    rate: float = 1.0

    def __post_init__(self) -> None:
        if self.steps < 0 or not self.rate > 0:
            raise ValueError(f"steps are 0 or more, at a rate above 0: {self.steps}, {self.rate}")
        self.activation  # noqa: B018 - it says what is wrong with the clip


@dataclass(frozen=True, slots=True)
class _Sample:
    """Inputs x [tokens, hidden], normalized, and rows [channels, hidden] of their readers."""

    x: torch.Tensor
    weight: torch.Tensor


class SpinQuant(QuaRot):
    """Rotated by a learned matrix, then symmetric integers rounded to nearest."""

    source = "SpinQuant, arXiv:2405.16406, section 3.2, with the losses of layers"
    options: SpinQuantOptions

    @property
    def needs_calibration(self) -> bool:
        return True

    @property
    def needs_stream(self) -> bool:
        return False

    def residual_rotation(self, state: QuantizationState) -> Rotation:
        start = super().residual_rotation(state)
        samples = self._samples(state)
        hidden = samples[0].x.shape[1]
        one = torch.eye(hidden, dtype=torch.float32, device=samples[0].x.device)
        return MatrixRotation(self._learned(start.apply(one).T.contiguous(), samples).double())

    @torch.no_grad()
    def _samples(self, state: QuantizationState) -> list[_Sample]:
        """Samples of every input that is the output of a norm, from one pass over the text."""
        assert state.calibration is not None  # needs_calibration
        segments = state.calibration.tokens
        share = -(-_TOKENS // len(segments))
        collected: dict[str, list[torch.Tensor]] = {}
        rows: dict[str, torch.Tensor] = {}
        hooks = []
        for block in range(state.layout.blocks):
            for site_input in state.layout.inputs_of(block):
                if site_input.through != "norm":
                    continue
                readers = readers_of(state, block, site_input)
                path = f"{state.layout.path}.{block}.{site_input.source}"

                def keep(
                    _: nn.Module,
                    given: tuple[Any, ...],
                    path: str = path,
                    readers: Any = readers,
                ) -> None:
                    x = given[0].reshape(-1, given[0].shape[-1]).float()
                    chosen = torch.randperm(len(x), generator=state.generator)[:share]
                    norm: Any = state.model.get_submodule(path)
                    scale = norm.weight.detach().float()
                    collected.setdefault(path, []).append(
                        x[chosen.to(x.device)] / torch.where(scale == 0, 1.0, scale)
                    )
                    if path not in rows:
                        weight = torch.cat([weight_of(state.model, site) for site in readers])
                        some = torch.randperm(len(weight), generator=state.generator)[:_ROWS]
                        rows[path] = weight[some.to(weight.device)].float() * scale

                first = linear_at(state.model, readers[0].name)
                hooks.append(first.register_forward_pre_hook(keep))
        device = state.model.get_input_embeddings().weight.device  # type: ignore[operator]
        try:
            for segment in segments:
                state.model(input_ids=segment[None].to(device), use_cache=False)
        finally:
            for hook in hooks:
                hook.remove()
        return [_Sample(torch.cat(parts), rows[path]) for path, parts in collected.items()]

    def _learned(self, start: torch.Tensor, samples: Sequence[_Sample]) -> torch.Tensor:
        """Return R, FP32 [hidden, hidden]. start: orthogonal."""
        rotation, best, least = start, start, float("inf")
        one = torch.eye(len(start), device=start.device)
        for step in range(self.options.steps + 1):
            with torch.enable_grad():
                variable = rotation.detach().requires_grad_()
                loss = self._loss(variable, samples)
                (gradient,) = torch.autograd.grad(loss, variable)
            if float(loss.detach()) < least:
                best, least = rotation, float(loss.detach())
            skew = gradient @ rotation.T
            skew = skew - skew.T
            length = self.options.rate * (1 - step / max(1, self.options.steps))
            half = skew * (0.5 * length / skew.norm().clamp(min=1e-30))
            rotation = torch.linalg.solve(one + half, (one - half) @ rotation)
        return best

    def _loss(self, rotation: torch.Tensor, samples: Sequence[_Sample]) -> torch.Tensor:
        losses = []
        for sample in samples:
            x, weight = sample.x @ rotation.T, sample.weight @ rotation.T
            if not self.options.activation.is_dense:
                x = fake_quantize(x, self.options.activation)
            if not self.options.weight.is_dense:
                weight = fake_quantize(weight, self.options.weight)
            exact = sample.x @ sample.weight.T
            losses.append((x @ weight.T - exact).square().sum() / exact.square().sum())
        return torch.stack(losses).mean()
