"""Parity of kernels with a model's codes: every launch that decoding the model can lead to.

A launch is a layer, a number of tokens and a configuration. Layers are those that `decode` runs (q,
k and v are one), with the model's own weights and inputs; for architectures that decode does not
have, each layer by itself. The kernel follows from the formats. One layer of each kernel, shape and
bias runs with 1 to 16 tokens, with numbers around powers of two, and on both sides of a change of
the configuration between two of these; with the configuration of steps (the tuner's stored choice,
if there is one) and with that of prompts. All other layers run once, with 1 to 16 tokens in turn.

The reference shares only the codes and the definition of a format with the kernel. It sums in
float64.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import cycle, pairwise
from typing import Any

import torch
from torch import nn

from flexq_bench.accuracy.as_decode import ModelWeights, decoded_architecture
from flexq_bench.decode.fused_layers import UnlikePartsError
from flexq_bench.decode.kernel_linear import KernelLinear, kernel_of
from flexq_bench.decode.layers import ChooseConfig
from flexq_bench.decode.loading import HEAD, linear_kernel
from flexq_bench.decode.text_decoder import operations_on
from flexq_bench.decode.tuning import StepTuner
from flexq_bench.decode.weights import WeightSource, dense_layer, layer_sizes, parts_of
from flexq_bench.errors import one_line
from flexq_bench.kernels.contract import Backend, Config, LinearKernel, PackedOperand
from flexq_bench.kernels.errors import KernelError
from flexq_bench.kernels.reference import Reference
from flexq_bench.kernels.runtime.module import compile_ahead
from flexq_bench.measure.check import relative_error
from flexq_bench.measure.inputs import derive_seed, realistic_activations
from flexq_bench.measure.tuning import Tuning
from flexq_bench.schemes.errors import QuantizeError
from flexq_bench.schemes.fake_quantization import FakeQuantizedLinear
from flexq_bench.schemes.quantized_layer import QuantizedLayer
from flexq_bench.workloads.gemm import GemmWorkload

# Largest number of tokens: of a prefill between two steps, and on a GPU of a captured prefill.
MOST_TOKENS: dict[Backend, int] = {"cpu": 512, "cuda": 2048}
STEP_TOKENS = 16  # each number of tokens up to this one is launched
_ADVICE = ": evaluate --through reference"
_INPUT_ROWS = 64  # of a layer's inputs: the first ones, which contain outliers
_GUARD_ROWS = 16  # after the output, which no launch may write


@dataclass(frozen=True, slots=True)
class LaunchParity:
    """Comparison of one launch with the reference.

    layer: its name. kernel: its label; empty: no kernel has the layer's formats, see `detail`. m:
    tokens. config: None: the kernel has no configurations. max_rel_error: as in
    flexq_bench.measure.check; infinite: an element is no number, or was not written.
    """

    layer: str
    kernel: str
    m: int
    n: int
    k: int
    config: Config | None
    max_rel_error: float
    detail: str = ""


@dataclass(frozen=True, slots=True)
class ParityLayer:
    """A layer as it is launched. inputs: FP16 rows [T, K], used in turn; None: they are drawn."""

    name: str
    layer: QuantizedLayer
    inputs: torch.Tensor | None = None


@torch.no_grad()
def kernel_parity(
    model: nn.Module,
    segment: torch.Tensor,
    *,
    largest_batch: int = STEP_TOKENS,
    labels: Sequence[str] = (),
    progress: Callable[[str], None] = lambda what: None,
) -> Iterator[LaunchParity]:
    """Compare every launch of a transformers model's quantized layers with the reference.

    segment: [T], int64: tokens from which the layers' inputs are computed. largest_batch: of steps.
    labels: kernels to take for their formats in place of those that decode. progress: called with
    the layer that is compared. Raises KernelError for an unknown label.
    """
    device = next(model.parameters()).device
    backend: Backend = "cuda" if device.type == "cuda" else "cpu"
    instead = [linear_kernel(label, backend) for label in labels]
    inputs = _inputs(model, segment.to(device))
    choose = StepTuner(
        device, operations_on(device), Tuning.REMEMBERED, frozenset(range(1, largest_batch + 1))
    )
    yield from launch_parity(
        layers_of(model, inputs),
        Choice(choose, largest_batch),
        device,
        instead=instead,
        progress=progress,
    )


def differing_weights(model: nn.Module) -> list[str]:
    """Return the names of layers whose evaluated weights are not those of their codes."""
    return [
        name
        for name, module in model.named_modules()
        if isinstance(module, FakeQuantizedLinear)
        and not _same_weights(module, FakeQuantizedLinear(name, module.layer))
    ]


def launch_parity(
    layers: Iterable[ParityLayer],
    choice: Choice,
    device: torch.device,
    *,
    instead: Sequence[LinearKernel] = (),
    progress: Callable[[str], None] = lambda what: None,
) -> Iterator[LaunchParity]:
    """Compare the launches of layers with the reference. instead: kernels, as in kernel_parity."""
    backend: Backend = "cuda" if device.type == "cuda" else "cpu"
    launched: dict[tuple[Any, ...], Iterator[int]] = {}
    for given in layers:
        progress(f"parity of kernels: {given.name}")
        n, k = given.layer.weight.rows, given.layer.weight.k
        formats = given.layer.weight_format, given.layer.activation_format
        named = (x for x in instead if (x.spec.weight, x.spec.activation) == formats)
        try:
            kernel = next(named, None) or kernel_of(given.name, given.layer)
        except QuantizeError as error:
            reason = str(error).removeprefix(f"{given.name}: ").removesuffix(_ADVICE)
            yield LaunchParity(given.name, "", 0, n, k, None, math.inf, reason)
            continue
        key = kernel.spec.label, n, k, given.layer.bias is not None
        if key in launched:
            counts = [next(launched[key])]
        else:
            launched[key] = cycle(range(1, STEP_TOKENS + 1))
            counts = launched_tokens(kernel, choice, n, k, MOST_TOKENS[backend])
        launches = [(m, config) for m in counts for config in choice.configs(kernel, m, n, k)]
        yield from _compared(kernel, given, launches, choice, device)


class Choice:
    """Configurations that decode launches: of steps of up to `largest_batch`, and of prompts.

    steps: the tuner's choice, by kernel, tokens, N and K.
    """

    def __init__(self, steps: ChooseConfig, largest_batch: int = STEP_TOKENS) -> None:
        self.steps, self._largest_batch = steps, largest_batch
        self._known: dict[tuple[str, int, int, int], list[Config | None]] = {}

    def configs(self, kernel: LinearKernel, m: int, n: int, k: int) -> list[Config | None]:
        """Return the distinct configurations for m tokens: one or two."""
        key = kernel.spec.label, m, n, k
        if key not in self._known:
            configs = [kernel.default_config(GemmWorkload(m, n, k))]
            if m <= self._largest_batch:
                step = self.steps(kernel, m, n, k)
                configs += [step] if step not in configs else []
            self._known[key] = configs
        return self._known[key]

    def code(self, kernel: LinearKernel, m: int, n: int, k: int) -> list[Any]:
        """Return what tells the code of launches apart: a library selects within its own."""
        gemm = GemmWorkload(m, n, k)
        return [
            config if kernel.builds_for(gemm, config) else type(config)
            for config in self.configs(kernel, m, n, k)
        ]


def launched_tokens(kernel: LinearKernel, choice: Choice, n: int, k: int, most: int) -> list[int]:
    """Numbers of tokens that cover the launches of a layer: see the module's docstring."""
    counts = {*range(1, min(STEP_TOKENS, most) + 1), most}
    power = 2 * STEP_TOKENS
    while power <= most:
        counts |= {power * 5 // 8, power * 3 // 4, power - 1, power, power + 1}
        power *= 2
    within = sorted(m for m in counts if m <= most)
    for low, high in pairwise(within):
        of_low = choice.code(kernel, low, n, k)
        if of_low == choice.code(kernel, high, n, k):
            continue
        while high - low > 1:
            middle = (low + high) // 2
            same = choice.code(kernel, middle, n, k) == of_low
            low, high = (middle, high) if same else (low, middle)
        counts |= {low, high}
    return sorted(m for m in counts if m <= most)


def layers_of(model: nn.Module, inputs: dict[str, torch.Tensor]) -> Iterator[ParityLayer]:
    """Yield a transformers model's layers as they are launched. inputs: rows by module name."""
    architecture = decoded_architecture(model)
    device = next(model.parameters()).device
    if architecture is None:
        yield from _modules(model, "", inputs)
        return
    source = ModelWeights(architecture, model)
    for index in range(architecture.dimensions.layers):
        try:
            for layer in source_layers(source, index, device):
                part = parts_of(layer.name.rpartition(" ")[2])[0]
                yield replace(layer, inputs=inputs.get(source.path(index, part)))
        except UnlikePartsError:  # decode can't run them, but each has a kernel
            yield from _modules(model, f"{source.path(index)}.", inputs)
    yield ParityLayer(HEAD, dense_layer(source.ends(device).head), inputs.get(HEAD))


def source_layers(source: WeightSource, index: int, device: torch.device) -> Iterator[ParityLayer]:
    """Yield the layers of a block as decode runs them, without inputs.

    Raises UnlikePartsError if it can't.
    """
    linears = source.block(index, device).linears
    for name, _, _ in layer_sizes(source.architecture):
        yield ParityLayer(f"block {index} {name}", linears.pop(name))


def _modules(
    model: nn.Module, prefix: str, inputs: dict[str, torch.Tensor]
) -> Iterator[ParityLayer]:
    for name, module in model.named_modules():
        if isinstance(module, FakeQuantizedLinear | KernelLinear) and name.startswith(prefix):
            yield ParityLayer(name, module.layer, inputs.get(name))


def _inputs(model: Any, segment: torch.Tensor) -> dict[str, torch.Tensor]:
    """First input rows, FP16, of every linear layer in a pass over a segment, by module name."""
    inputs: dict[str, torch.Tensor] = {}
    linear = (FakeQuantizedLinear, KernelLinear, nn.Linear)
    modules = {name: m for name, m in model.named_modules() if isinstance(m, linear)}
    modules[HEAD] = model.get_output_embeddings()

    def keeping(name: str) -> Callable[[nn.Module, tuple[Any, ...]], None]:
        def keep(_: nn.Module, arguments: tuple[Any, ...]) -> None:
            rows = arguments[0].detach().reshape(-1, arguments[0].shape[-1])
            if len(rows):  # an expert may get no tokens
                inputs[name] = rows[:_INPUT_ROWS].to(torch.float16)

        return keep

    handles = [m.register_forward_pre_hook(keeping(name)) for name, m in modules.items()]
    try:
        # The class's own forward pass calls the modules. The instance may have decode's instead.
        type(model).forward(model, input_ids=segment[None], use_cache=False)
    finally:
        for handle in handles:
            handle.remove()
    return inputs


def _compared(
    kernel: LinearKernel,
    given: ParityLayer,
    launches: Sequence[tuple[int, Config | None]],
    choice: Choice,
    device: torch.device,
) -> Iterator[LaunchParity]:
    """Compare launches (tokens, configuration) of one layer."""
    n, k = given.layer.weight.rows, given.layer.weight.k
    x = given.layer.rotated(_rows(given, max(m for m, _ in launches), device)).half()
    if device.type == "cuda":
        gemms = [(GemmWorkload(m, n, k), config) for m, config in launches]
        compile_ahead([b for gemm, config in gemms for b in kernel.builds_for(gemm, config)])
    packed = kernel.narrow(given.layer.packed_for(kernel), choice.steps(kernel, 1, n, k))
    reference = _reference(FakeQuantizedLinear(given.name, given.layer), x)
    bias = None if given.layer.bias is None else given.layer.bias.half()
    for m, config in launches:
        expected = Reference(reference.y[:m], reference.magnitude[:m])
        worst, detail = 0.0, ""
        try:
            for y, after in _outputs(kernel, packed, x[:m], bias, config):
                error = float(relative_error(y, expected).nan_to_num(nan=math.inf).max())
                worst = max(worst, error)
                if not bool(after.isnan().all()):
                    worst, detail = math.inf, "writes beyond its output"
        except (KernelError, ValueError) as error:
            worst, detail = math.inf, one_line(error)
        yield LaunchParity(given.name, kernel.spec.label, m, n, k, config, worst, detail)


def _outputs(
    kernel: LinearKernel,
    w: PackedOperand,
    x: torch.Tensor,
    bias: torch.Tensor | None,
    config: Config | None,
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Launch as after a fused operator, and as after attention of a prompt.

    Yields the output FP16 [M, N] and the rows after it, both NaN where nothing was written.
    """
    m, k = x.shape

    def empty() -> tuple[PackedOperand, torch.Tensor]:
        whole = x.new_full((m + _GUARD_ROWS, w.rows), torch.nan)
        return kernel.empty_activation(m, k, x.device), whole

    packed, y = empty()
    ready = kernel.activated(x, kernel.for_weights(packed, w))
    made = kernel.gemm(ready, w, y[:m], bias=bias, config=config)
    yield y[:m] if made is None else made, y[m:]
    if type(kernel).linear is not LinearKernel.linear:
        packed, y = empty()
        made = kernel.linear(x, packed, w, y[:m], bias=bias, config=config)
        yield y[:m] if made is None else made, y[m:]


def _rows(given: ParityLayer, count: int, device: torch.device) -> torch.Tensor:
    """FP16 [count, K]: the layer's inputs in turn, smaller with each turn so that rows differ."""
    if given.inputs is None:
        gemm = GemmWorkload(count, given.layer.weight.rows, given.layer.weight.k)
        generator = torch.Generator(device).manual_seed(derive_seed(0, given.name))
        return realistic_activations(gemm, generator)
    numbers = torch.arange(count, device=device)
    turns = numbers // len(given.inputs)
    shrunk = 1 - turns.float()[:, None] / (2 * (1 + int(turns.max())))
    return (given.inputs[numbers % len(given.inputs)].float() * shrunk).half()


def _reference(layer: FakeQuantizedLinear, x: torch.Tensor) -> Reference:
    """The layer's output for rotated inputs, summed in float64, and the sum of magnitudes."""
    rows = x.float() if layer.order is None else x.float()[:, layer.order]
    rows = rows if layer.activation is None else layer.activation(rows)
    rows, weight = rows.double(), layer.weight.double()
    y, magnitude = rows @ weight.T, rows.abs() @ weight.abs().T
    if layer.bias is not None:
        bias = layer.bias.double()
        y, magnitude = y + bias, magnitude + bias.abs()
    return Reference(y, magnitude)


def _same_weights(first: FakeQuantizedLinear, second: FakeQuantizedLinear) -> bool:
    return torch.equal(first.weight, second.weight) and (
        first.bias is second.bias is None
        or (
            first.bias is not None
            and second.bias is not None
            and torch.equal(first.bias, second.bias)
        )
    )
