"""The path that serves: decode's engine, forced along known tokens, against transformers.

Both compute the same codes. The engine runs as `decode` and `decode --serve` do: prompts whole and
in chunks, steps of several batch sizes, sequences of unlike lengths in slots that are used again,
captured graphs, the configurations that would be chosen, and the KV cache's format. After every
forward pass its logits are compared with those of transformers at the same position of the same
tokens, and the engine's own token is replaced by the known one.

FP16 rounds differently in the two, and a rounded activation may get another code then. That noise
is measured: it is the divergence of transformers in FP16 from transformers in FP32 at the same
positions. Codes of 6 bits make it a thousand times as large, so such a model also runs with its
weights in FP16, which shows what is wrong between the layers: attention, KV cache, norms, picking.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from flexq_bench.accuracy.agreement import (
    AgreementMeter,
    ReferenceLogits,
    divergence,
    record_reference,
)
from flexq_bench.accuracy.as_decode import ModelWeights, decoded_architecture
from flexq_bench.accuracy.errors import AccuracyError
from flexq_bench.accuracy.perplexity import perplexity
from flexq_bench.accuracy.repetition import loops
from flexq_bench.decode.continuous_batching import Iteration, step_sizes
from flexq_bench.decode.decoder import Model
from flexq_bench.decode.engine import Engine, bucket_of
from flexq_bench.decode.kernel_linear import KernelLinear
from flexq_bench.decode.loading import load
from flexq_bench.decode.quantized_cache import quantize_cache
from flexq_bench.decode.requests import ServingRequest
from flexq_bench.decode.serving import serve
from flexq_bench.decode.text_decoder import operations_on
from flexq_bench.decode.tuning import StepTuner
from flexq_bench.decode.weights import dense_layer
from flexq_bench.measure.tuning import Tuning
from flexq_bench.schemes.fake_quantization import FakeQuantizedLinear

SHIPPED, IN_FP16 = "as shipped", "weights in FP16"  # layers of a phase
_LEAST_MEAN, _LEAST_WORST = 1e-6, 1e-5  # nats: FP32 itself rounds to about a tenth of that
_SHORT_PROMPT = 5  # tokens
_MIN_LENGTH = 16  # tokens of a sequence, for a prompt and steps


@dataclass(frozen=True, slots=True)
class PathPlan:
    """Settings of the engine.

    batches: sequences at a time. steps: decode steps after each prompt, at most a quarter of a
    sequence. step_tokens: largest prefill between two steps of serving.
    """

    batches: tuple[int, ...] = (1, 3, 8, 32)
    steps: int = 12
    step_tokens: int = 512


@dataclass(frozen=True, slots=True)
class Noise:
    """Divergence by rounding over all positions of all sequences, in nats, with a least value.

    deviation: standard deviation of a position.
    """

    mean: float
    worst: float
    deviation: float


@dataclass(frozen=True, slots=True)
class PathPhase:
    """Passes of one kind, with a value for each predicted token.

    layers: SHIPPED or IN_FP16. way: "decode" or "serve". phase: "prompt" or "step". kl: divergence
    of the engine's predictions, nats; infinite: they are no numbers. rounding: of transformers'
    predictions in FP16. positions: of the predicted tokens. wrong_picks: tokens that are not the
    likeliest, or are stored at a wrong position. noise: of these layers.
    """

    layers: str
    way: str
    batch: int
    phase: str
    kl: NDArray[np.float32]
    rounding: NDArray[np.float32]
    positions: NDArray[np.int64]
    wrong_picks: int
    noise: Noise

    @property
    def name(self) -> str:
        """For example "serve, batch 8, step"."""
        return f"{self.way}, batch {self.batch}, {self.phase}"

    @property
    def mean(self) -> float:
        """Mean divergence in multiples of that of rounding at these positions.

        Or at all positions, if that and two standard errors is more: of a few tokens, one may
        differ by far.
        """
        chance = self.noise.mean + 2 * self.noise.deviation / math.sqrt(len(self.kl))
        return float(self.kl.mean()) / max(float(self.rounding.mean()), chance)

    @property
    def worst(self) -> float:
        """Largest divergence in multiples of the largest of rounding at any position."""
        return float(self.kl.max()) / self.noise.worst


@dataclass(frozen=True, slots=True)
class Generations:
    """Greedy continuations of prompts, int64 [prompts, new], up to and including `ends`.

    ends: ids that end a text.
    """

    tokens: tuple[tuple[int, ...], ...]
    ended: tuple[bool, ...]

    @property
    def mean_length(self) -> float:
        return sum(map(len, self.tokens)) / len(self.tokens)

    @property
    def share_ended(self) -> float:
        return sum(self.ended) / len(self.ended)

    @property
    def share_looping(self) -> float:
        """Share of texts whose end repeats."""
        return sum(map(loops, self.tokens)) / len(self.tokens)

    def agreement(self, other: Generations) -> float:
        """Mean share of the other's tokens before the first that differs."""
        shares = [
            _common_prefix(own, theirs) / len(theirs)
            for own, theirs in zip(self.tokens, other.tokens, strict=True)
        ]
        return sum(shares) / len(shares)


@dataclass(frozen=True, slots=True)
class PathResult:
    """Forced decoding, and greedy generations."""

    phases: tuple[PathPhase, ...]
    generations: Generations


def serving_path(
    model: Any,
    sequences: torch.Tensor,
    prompts: torch.Tensor,
    plan: PathPlan,
    *,
    kv_bits: int,
    new: int,
    ends: frozenset[int],
    progress: Callable[[str], None] = lambda what: None,
) -> PathResult:
    """Force the engine along sequences, int64 [N, T], and let it continue prompts, int64 [P, T].

    model: of transformers, with quantized layers that have codes, or none. kv_bits: of keys and
    values. new, ends: tokens of a continuation at most, and ids that end it. progress: called with
    what is computed. Raises AccuracyError if decode doesn't have the architecture or sequences are
    too short, UnlikePartsError or UsageError for layers that decode can't run.
    """
    if decoded_architecture(model) is None:
        raise AccuracyError(f"decode does not have {type(model).__name__}")
    if sequences.shape[1] < _MIN_LENGTH:
        raise AccuracyError(f"sequences of {_MIN_LENGTH} tokens are needed: give a longer context")
    phases: list[PathPhase] = []
    run = _Run(model, sequences, plan, kv_bits, SHIPPED, progress)
    phases += run.forced()
    tokens = run.continued(prompts, new)
    del run
    if any(module.layer.activation is not None for module in _quantized(model).values()):
        phases += _Run(model, sequences, plan, kv_bits, IN_FP16, progress).forced()
    return PathResult(tuple(phases), cut_at_ends(tokens, ends))


def greedy(model: Any, prompts: torch.Tensor, new: int, ends: frozenset[int]) -> Generations:
    """Continue prompts, int64 [P, T], by the likeliest tokens of a model of transformers."""
    ids = prompts.to(next(model.parameters()).device)
    cache, tokens = None, []
    with torch.no_grad():
        for _ in range(new):
            out = model(input_ids=ids, past_key_values=cache, use_cache=True)
            cache, ids = out.past_key_values, out.logits[:, -1].argmax(dim=-1, keepdim=True)
            tokens.append(ids)
    return cut_at_ends(torch.cat(tokens, dim=1), ends)


def cut_at_ends(tokens: torch.Tensor, ends: frozenset[int]) -> Generations:
    """Cut each row of tokens [P, new] after the first id that ends a text."""
    cut = [_until_end(row, ends) for row in tokens.tolist()]
    return Generations(tuple(cut), tuple(row[-1] in ends for row in cut))


class _Run:
    """The engine's model and the predictions that it is compared with, for one kind of layers."""

    def __init__(
        self,
        model: Any,
        sequences: torch.Tensor,
        plan: PathPlan,
        kv_bits: int,
        layers: str,
        progress: Callable[[str], None],
    ) -> None:
        self._sequences, self._plan, self._layers = sequences, plan, layers
        self._kv_bits, self._progress = kv_bits, progress
        self._device = next(model.parameters()).device
        self._length = sequences.shape[1]
        self._steps = min(plan.steps, self._length // 4)
        twin = _twin(model, kv_bits, in_fp16=layers == IN_FP16)
        progress(f"serving path, {layers}: transformers")
        _cast(twin, torch.float32)
        self._reference = record_reference(twin, sequences.flatten(), context=self._length)
        meter = AgreementMeter(self._reference)
        _cast(twin, torch.float16)
        perplexity(twin, sequences.flatten(), context=self._length, on_logits=meter)
        self._rounding = np.nan_to_num(meter.result().token_kl, nan=0.0)
        mean, worst = float(self._rounding.mean()), float(self._rounding.max())
        deviation = float(self._rounding.std())
        self._noise = Noise(max(mean, _LEAST_MEAN), max(worst, _LEAST_WORST), deviation)
        architecture = decoded_architecture(twin)
        assert architecture is not None  # that of `model`
        sizes = frozenset(size for batch in plan.batches for size in (batch, *step_sizes(batch)))
        self._operations = operations_on(self._device)
        self._choose = StepTuner(self._device, self._operations, Tuning.REMEMBERED, sizes)
        source = ModelWeights(architecture, twin)
        self._model: Model = load(
            source,
            self._device,
            architecture.dimensions.context,
            self._choose,
            tuple(sorted(sizes)),
        )

    @torch.inference_mode()
    def forced(self) -> Iterator[PathPhase]:
        """Run every batch size, as `decode` and as `decode --serve` do."""
        for batch in self._plan.batches:
            for way, run in (("decode", self._decode), ("serve", self._serve)):
                self._progress(f"serving path, {self._layers}: {way}, batch {batch}")
                forced = _Forced(self._reference, self._sequences, self._rounding, self._device)
                run(forced, batch)
                for phase, seen in forced.phases.items():
                    yield seen.phase(self._layers, way, batch, phase, self._noise)

    @torch.inference_mode()
    def continued(self, prompts: torch.Tensor, new: int) -> torch.Tensor:
        """Return greedy continuations of prompts, int64 [P, new]."""
        count, length = prompts.shape
        self._progress(f"serving path: {count} continuations")
        with closing(self._engine(count, length + new)) as engine:
            return engine.generate(prompts.int().to(self._device), new).tokens

    def _decode(self, forced: _Forced, batch: int) -> None:
        """Prompts of equal length, each with steps: short ones, long ones, and some between.

        Each batch size has others of these: serving has all lengths at each.
        """
        steps = self._steps
        ids = forced.rows(range(batch)).int()
        with closing(self._engine(batch, self._length)) as engine:
            short, *between, long = prompt_lengths(self._length, steps)
            first = self._plan.batches.index(batch)
            for prompt in (short, *between[first :: len(self._plan.batches)], long):

                def on_pass(position: int, logits: torch.Tensor, prompt: int = prompt) -> None:
                    places = [(slot, slot, slot, position) for slot in range(batch)]
                    forced.judge(engine, "prompt" if position == prompt else "step", places, logits)

                engine.generate(ids[:, :prompt], steps, on_pass)

    def _serve(self, forced: _Forced, batch: int) -> None:
        """Requests of unlike lengths, more than there are slots."""
        generator = np.random.default_rng(batch)
        count, most = 2 * batch + 1, self._length - 2 * self._steps
        drawn = generator.integers(1, most, count)
        answers = generator.integers(1, 2 * self._steps + 1, count)
        requests = [
            ServingRequest(int(prompt), int(new))
            for prompt, new in zip(drawn, answers, strict=True)
        ]
        prompts = forced.rows(range(count))[:, : int(drawn.max())].int()
        followed = _Followed(requests, forced)
        with closing(self._engine(batch, self._length)) as engine:
            serve(
                engine,
                requests,
                prompts,
                self._plan.step_tokens,
                lambda iteration, logits: followed.judge(engine, iteration, logits),
            )

    def _engine(self, slots: int, capacity: int) -> Engine:
        return Engine(
            self._model,
            self._operations,
            self._choose,
            slots=slots,
            capacity=capacity,
            kv_bits=self._kv_bits,
        )


Place = tuple[int, int, int, int]  # row of the logits, slot, sequence, predicted position


@dataclass(slots=True)
class _Seen:
    """Parts of a PathPhase so far, one for each pass."""

    kl: list[torch.Tensor]
    rounding: list[NDArray[np.float32]]
    positions: list[NDArray[np.int64]]
    wrong_picks: list[torch.Tensor]

    def phase(self, layers: str, way: str, batch: int, phase: str, noise: Noise) -> PathPhase:
        kl = torch.cat(self.kl).cpu().numpy()
        rounding, positions = np.concatenate(self.rounding), np.concatenate(self.positions)
        wrong_picks = int(torch.stack(self.wrong_picks).sum())
        return PathPhase(layers, way, batch, phase, kl, rounding, positions, wrong_picks, noise)


class _Forced:
    """Compares passes of an engine with the reference, and replaces the tokens it picked."""

    def __init__(
        self,
        reference: ReferenceLogits,
        sequences: torch.Tensor,
        rounding: NDArray[np.float32],
        device: torch.device,
    ) -> None:
        self._head = reference.head
        self._hidden = torch.stack(reference.hidden).to(device)
        self._tokens = sequences.to(device)
        self._rounding = rounding
        self.phases: dict[str, _Seen] = {}

    def rows(self, numbers: Sequence[int]) -> torch.Tensor:
        """Return sequences int64 [N, T]; a number beyond the last one begins again."""
        return self._tokens[torch.tensor(numbers, device=self._tokens.device) % len(self._tokens)]

    def judge(
        self,
        engine: Engine,
        phase: str,
        places: Sequence[Place],
        logits: torch.Tensor,
        forcing: Sequence[bool] | None = None,
    ) -> None:
        """Compare one pass. forcing: places whose token is replaced; None: all."""
        table = torch.tensor(places, dtype=torch.int64)
        table[:, 2] %= len(self._tokens)
        rows, slots, sequences, positions = table.to(self._tokens.device).T
        ours = logits[rows].float()
        theirs = self._head.logits(self._hidden[sequences, positions - 1])
        kl = divergence(ours.log_softmax(-1), theirs.float().log_softmax(-1))
        picked = engine.tokens[slots].long()
        chosen = ours.gather(1, picked[:, None])[:, 0]
        right = (
            (chosen >= ours.amax(dim=1))
            & (engine.positions[slots] == positions)
            & (engine.history[slots, positions] == picked)
        )
        seen = self.phases.setdefault(phase, _Seen([], [], [], []))
        seen.kl.append(kl.nan_to_num(nan=torch.inf, posinf=torch.inf))
        _, _, on_host, at = table.numpy().T
        seen.rounding.append(self._rounding[on_host, at - 1])
        seen.positions.append(at)
        seen.wrong_picks.append((~right).sum())
        wanted = self._tokens[sequences, positions].int()
        if forcing is not None:
            kept = torch.tensor(forcing, device=slots.device)
            slots, wanted = slots[kept], wanted[kept]
        engine.tokens[slots] = wanted


class _Followed:
    """The requests in an engine's slots while it serves."""

    def __init__(self, requests: Sequence[ServingRequest], forced: _Forced) -> None:
        self._requests, self._forced = requests, forced
        self._next: dict[int, tuple[int, int]] = {}  # by slot: request, next predicted position

    def judge(self, engine: Engine, iteration: Iteration, logits: torch.Tensor) -> None:
        """Compare the pass of an iteration."""
        if iteration.prefill is None:
            places = [(slot, slot, *place) for slot, place in sorted(self._next.items())]
            self._forced.judge(engine, "step", places, logits)
            self._next = {slot: (index, at + 1) for slot, (index, at) in self._next.items()}
        else:
            chunks = iteration.prefill.chunks
            places = [
                (row, chunk.slot, chunk.index, chunk.start + chunk.count)
                for row, chunk in enumerate(chunks)
            ]
            whole = [at == self._requests[index].prompt_tokens for _, _, index, at in places]
            # Where a prompt goes on, the token is not used.
            self._forced.judge(engine, "prompt", places, logits, whole)
            for (_, slot, index, at), is_whole in zip(places, whole, strict=True):
                if is_whole:
                    self._next[slot] = index, at + 1
        for slot, _ in iteration.finished:
            del self._next[slot]


def prompt_lengths(longest: int, steps: int) -> list[int]:
    """Lengths of prompts after which steps cross the ends of buckets of attention.

    longest: tokens of a sequence. Also a short prompt, and one that ends with the sequence.
    """
    ends = {bucket_of(length, longest) for length in range(1, longest + 1)}
    crossing = {end - steps // 2 for end in ends}
    lengths = {_SHORT_PROMPT, longest - steps, *crossing}
    return sorted(length for length in lengths if 1 <= length <= longest - steps)


def _quantized(model: nn.Module) -> dict[str, KernelLinear | FakeQuantizedLinear]:
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, KernelLinear | FakeQuantizedLinear)
    }


def _twin(model: Any, kv_bits: int, *, in_fp16: bool) -> Any:
    """Return a model that computes the same codes in torch, by the forward pass of transformers.

    in_fp16: dequantized, in FP16, with activations that are not rounded. Other layers are copied.
    """
    memo: dict[int, Any] = {}
    for name, module in _quantized(model).items():
        if in_fp16:
            weight = module.layer.weight.in_own_order().half()
            layer = dense_layer(weight, module.layer.bias)
            memo[id(module)] = FakeQuantizedLinear(name, layer)
        elif isinstance(module, FakeQuantizedLinear):
            memo[id(module)] = module
        else:
            memo[id(module)] = FakeQuantizedLinear(name, module.layer)
    decoded = vars(model).get("forward")
    if decoded is not None:
        memo[id(decoded)] = decoded
    twin = copy.deepcopy(model, memo)
    if decoded is not None:
        del twin.forward
        scales = [block.fp8_scales for block in decoded.decoder.model.blocks]
        quantize_cache(twin, kv_bits, [s for s in scales if s is not None] or None)
    return twin


def _cast(model: nn.Module, dtype: torch.dtype) -> None:
    """Convert parameters, but no buffers: frequencies of rotary angles stay FP32."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)


def _until_end(tokens: list[int], ends: frozenset[int]) -> tuple[int, ...]:
    last = next((index for index, token in enumerate(tokens) if token in ends), len(tokens))
    return tuple(tokens[: last + 1])


def _common_prefix(first: Sequence[int], second: Sequence[int]) -> int:
    shorter = min(len(first), len(second))
    return next((i for i in range(shorter) if first[i] != second[i]), shorter)
