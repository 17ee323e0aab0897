"""Find damage by the checks of the serving path: kernels, attention, KV cache and picking.

    python benchmarks/accuracy/path_damage.py --model DIR [--scheme w8a16,flexq-w6ax]
        [--random llama-13b] [--batch 1,3,8,32] [--tokens 384] [--out rows.json]

Runs the engine undamaged, and under each damage that `DAMAGES` lists, as the gate does. `mean` and
`worst` are the largest divergences of any phase in multiples of those that rounding makes. `picks`:
tokens that are not the likeliest. `launches`: kernel launches beyond the tolerance.
--random: parity of all layers of a catalog model with random weights instead. Exit code 1: damage
is not found, or something is found without damage.
"""

from __future__ import annotations

import argparse
import copy
import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from output import say

from flexq_bench.accuracy.loading import load_model
from flexq_bench.accuracy.parity import Choice, kernel_parity, launch_parity, source_layers
from flexq_bench.accuracy.serving_path import PathPlan, PathResult, greedy, serving_path
from flexq_bench.accuracy.setup import best_device
from flexq_bench.decode.architecture import of_catalog
from flexq_bench.decode.quantized_cache import quantize_cache
from flexq_bench.decode.rounded_weights import RoundedWeights
from flexq_bench.decode.text_decoder import operations_on
from flexq_bench.decode.tuning import StepTuner
from flexq_bench.decode.weights import SyntheticWeights
from flexq_bench.kernels import registry
from flexq_bench.kernels.contract import LinearKernel
from flexq_bench.measure.tuning import Tuning
from flexq_bench.schemes.registry import resolve
from flexq_bench.workloads.models import load_catalog

MEAN, WORST, TOLERANCE = 3.0, 5.0, 1e-3  # as in the default policy
Damage = Callable[[torch.device, frozenset[str]], AbstractContextManager[None]]


@contextmanager
def zeroed_tokens(
    device: torch.device, labels: frozenset[str], *, first: int, last: int
) -> Iterator[None]:
    """The output of every kernel is zero for these numbers of tokens."""
    kernels = [registry.resolve(label, device.type) for label in labels]
    for kernel in kernels:
        assert isinstance(kernel, LinearKernel)
        for name in ("gemm", "linear"):
            run = getattr(kernel, name)

            def damaged(*arguments: Any, run: Any = run, name: str = name, **named: Any) -> None:
                run(*arguments, **named)
                out = arguments[2 if name == "gemm" else 3]
                if first <= out.shape[0] <= last:
                    out.zero_()

            setattr(kernel, name, damaged)
    try:
        yield
    finally:
        for kernel in kernels:
            del kernel.gemm, kernel.linear  # type: ignore[union-attr]


@contextmanager
def _operator(
    name: str, damaged: Callable[..., Any], device: torch.device, _: frozenset[str]
) -> Iterator[None]:
    kind = type(operations_on(device))
    run = getattr(kind, name)

    def call(self: Any, *arguments: Any, **named: Any) -> Any:
        return damaged(partial(run, self), *arguments, **named)

    with patch.object(kind, name, call):
        yield


def _scaled(part: str, factor: float) -> Callable[..., Any]:
    def attend(run: Any, qkv: torch.Tensor, shape: Any, *rest: Any) -> Any:
        queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        start, stop = {"queries": (0, queries), "keys": (queries, queries + keys)}[part]
        qkv[..., start:stop] *= factor
        return run(qkv, shape, *rest)

    return attend


def _rotated(run: Any, qkv: torch.Tensor, shape: Any, *rest: Any) -> Any:
    return run(qkv, replace(shape, rotary=shape.rotary.roll(-1, 0)), *rest)


def _stale(run: Any, qkv: Any, shape: Any, cache: Any, positions: Any, *rest: Any) -> None:
    rows = torch.arange(len(positions), device=positions.device)
    at = positions.long()
    before = cache.codes[:, rows, :, at].clone()
    run(qkv, shape, cache, positions, *rest)
    kept = (at % 8 == 4)[:, None, None, None]
    cache.codes[:, rows, :, at] = torch.where(kept, before, cache.codes[:, rows, :, at])


def _other_slot(run: Any, qkv: Any, shape: Any, cache: Any, slots: Any, *rest: Any) -> Any:
    return run(qkv, shape, cache, slots.roll(1), *rest)


def _second(run: Any, logits: torch.Tensor, *rest: Any) -> None:
    changed = logits.clone()
    changed[:1].scatter_(1, logits[:1].argmax(dim=1, keepdim=True), -torch.inf)
    run(changed, *rest)


def _late(run: Any, logits: Any, tokens: Any, positions: Any, history: Any) -> None:
    run(logits, tokens, positions, history)
    positions[2:] -= 1


def _norm(run: Any, residual: Any, delta: Any, norm: Any, to: Any) -> Any:
    return run(residual, delta, replace(norm, weight=norm.weight * 1.01), to)


def _silu(run: Any, gate_up: torch.Tensor, to: Any) -> None:
    half = gate_up.shape[1] // 2
    gate_up[:, :half] *= 1.02
    run(gate_up, to)


DAMAGES: dict[str, Damage] = {
    "nothing": lambda *_: nullcontext(),
    **{
        f"kernels at zero, {first} to {last} tokens": partial(zeroed_tokens, first=first, last=last)
        for first, last in ((1, 1), (1, 7), (3, 3), (9, 64), (128, 512))
    },
    "softmax scale x 1.02 in steps": partial(_operator, "attend", _scaled("queries", 1.02)),
    "softmax scale x 1.02 in prompts": partial(
        _operator, "attend_prompts", _scaled("queries", 1.02)
    ),
    "cached keys x 1.02 in steps": partial(_operator, "attend", _scaled("keys", 1.02)),
    "positions of steps off by one": partial(_operator, "attend", _rotated),
    "one of 8 KV entries of steps stale": partial(_operator, "attend", _stale),
    "chunks in another's slot": partial(_operator, "attend_prompts", _other_slot),
    "slot 0 gets the second token": partial(_operator, "pick", _second),
    "position not advanced from slot 2 on": partial(_operator, "pick", _late),
    "norms x 1.01": partial(_operator, "norm", _norm),
    "gate x 1.02": partial(_operator, "silu_mul", _silu),
}


def judged(result: PathResult, launches: list[Any]) -> dict[str, Any]:
    """The largest values of any phase, and whether a limit fails."""
    mean = max(result.phases, key=lambda phase: phase.mean)
    worst = max(result.phases, key=lambda phase: phase.worst)
    picks = sum(phase.wrong_picks for phase in result.phases)
    wrong = [launch for launch in launches if launch.max_rel_error > TOLERANCE]
    return {
        "mean": mean.mean,
        "mean_at": f"{mean.layers}: {mean.name}",
        "worst": worst.worst,
        "worst_at": f"{worst.layers}: {worst.name}",
        "picks": picks,
        "launches": len(launches),
        "wrong_launches": len(wrong),
        "wrong_tokens": sorted({launch.m for launch in wrong}),
        "fails": bool(mean.mean > MEAN or worst.worst > WORST or picks or wrong),
        "noise": {p.layers: (p.noise.mean, p.noise.worst) for p in result.phases},
        "phases": {f"{p.layers}: {p.name}": (p.mean, p.worst) for p in result.phases},
    }


class Stages:
    """Seconds of each stage that progress was reported of."""

    def __init__(self) -> None:
        self._begun: list[tuple[float, str]] = []

    def begin(self, what: str) -> None:
        self._begun.append((time.perf_counter(), what))

    def seconds(self) -> dict[str, float]:
        ends = [began for began, _ in self._begun[1:]] + [time.perf_counter()]
        taken = {
            what: round(end - began, 2)
            for (began, what), end in zip(self._begun, ends, strict=True)
        }
        return {what: seconds for what, seconds in taken.items() if seconds >= 0.3}


def damage_rows(options: argparse.Namespace, device: torch.device) -> Iterator[dict[str, Any]]:
    loaded = load_model(options.model, device=device)
    text = Path(options.text or Path(options.model) / "heldout.txt").read_text()
    tokens = torch.tensor(loaded.tokenizer(text)["input_ids"])
    batches = tuple(int(size) for size in options.batch.split(","))
    length = min(options.tokens, loaded.context())
    count = min(max(batches), len(tokens) // length)
    sequences = tokens[: count * length].view(count, length)
    plan = PathPlan(batches, steps=options.steps)
    for name in options.scheme.split(","):
        scheme = resolve(name)
        model = copy.deepcopy(loaded.model)
        scheme.quantize(model)
        quantize_cache(model, scheme.kv_bits)
        labels: frozenset[str] = frozenset()
        for damage, entering in DAMAGES.items():
            if options.only and options.only not in damage:
                continue
            began, stages = time.perf_counter(), Stages()
            with entering(device, labels):
                result = serving_path(
                    model, sequences, sequences[:8, :16], plan,
                    kv_bits=scheme.kv_bits, new=options.new, ends=frozenset([0]),
                    progress=stages.begin,
                )  # fmt: skip
                path_s = time.perf_counter() - began
                is_of_kernels = damage in ("nothing",) or "kernels" in damage
                launches = (
                    list(kernel_parity(model, sequences[0], progress=stages.begin))
                    if is_of_kernels
                    else []
                )
            labels = labels or frozenset(launch.kernel for launch in launches)
            row = {"scheme": name, "damage": damage, **judged(result, launches)}
            row |= {"path_s": path_s, "parity_s": time.perf_counter() - began - path_s}
            row["stages"] = stages.seconds()
            if damage == "nothing":
                began = time.perf_counter()
                original = greedy(loaded.model, sequences[:8, :16], options.new, frozenset([0]))
                own = result.generations
                row |= {
                    "greedy_s": time.perf_counter() - began,
                    "agreement": own.agreement(original),
                    "looping": (own.share_looping, original.share_looping),
                }
            yield row


def random_row(name: str, scheme: str, device: torch.device) -> dict[str, Any]:
    """Parity of every layer of a catalog model with random weights."""
    began = time.perf_counter()
    source = RoundedWeights(SyntheticWeights(of_catalog(load_catalog()[name]), 0), resolve(scheme))
    tuner = StepTuner(device, operations_on(device), Tuning.REMEMBERED, frozenset(range(1, 17)))
    layers = (
        layer
        for index in range(source.architecture.dimensions.layers)
        for layer in source_layers(source, index, device)
    )
    launches = list(launch_parity(layers, Choice(tuner), device))
    worst = max(launches, key=lambda launch: launch.max_rel_error)
    return {
        "scheme": scheme,
        "damage": f"nothing, {name}",
        "launches": len(launches),
        "wrong_launches": sum(launch.max_rel_error > TOLERANCE for launch in launches),
        "worst_launch": str(worst),
        "fails": worst.max_rel_error > TOLERANCE,
        "parity_s": time.perf_counter() - began,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="examples/models/tiny-llama")
    parser.add_argument("--text")
    parser.add_argument("--scheme", default="w8a16,flexq-w6ax")
    parser.add_argument("--random")
    parser.add_argument("--batch", default="1,3,8,32")
    parser.add_argument("--tokens", type=int, default=384)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--new", type=int, default=48)
    parser.add_argument("--only", default="", help="damage whose name contains this")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    device = torch.device(best_device())
    rows: list[dict[str, Any]] = []
    given = (
        (random_row(options.random, name, device) for name in options.scheme.split(","))
        if options.random
        else damage_rows(options, device)
    )
    for row in given:
        rows.append(row)
        shown = " ".join(
            f"{key} {row[key]:.3g}" if isinstance(row[key], float) else f"{key} {row[key]}"
            for key in (
                *("scheme", "damage", "fails", "mean", "worst", "picks", "wrong_launches"),
                *("launches", "wrong_tokens", "path_s", "parity_s", "greedy_s", "agreement"),
                "worst_launch",
            )
            if key in row
        )
        say(shown)
        if options.out:
            options.out.write_text(json.dumps(rows, indent=1))
    wrong = [row for row in rows if row["fails"] == row["damage"].startswith("nothing")]
    say(f"{len(wrong)} of {len(rows)} judged wrongly")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
