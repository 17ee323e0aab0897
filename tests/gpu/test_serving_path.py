"""The serving path on a GPU: captured graphs, CUDA operators, tuned configurations."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks" / "accuracy"))

from path_damage import DAMAGES, judged

from flexq_bench.accuracy.loading import LoadedModel, load_model
from flexq_bench.accuracy.parity import kernel_parity
from flexq_bench.accuracy.serving_path import PathPlan, PathResult, serving_path
from flexq_bench.decode.quantized_cache import quantize_cache
from flexq_bench.kernels import registry
from flexq_bench.kernels.autotune import TuningMemory
from flexq_bench.kernels.contract import Config, LinearKernel
from flexq_bench.schemes.registry import resolve

DEVICE = torch.device("cuda")
TINY = Path(__file__).parents[2] / "examples" / "models" / "tiny-llama"
LENGTH, TOLERANCE = 200, 1e-3
PLAN = PathPlan((1, 3, 9), steps=8)
BATCH = 3

Run = Callable[[str], PathResult]
Under = Callable[[str], Any]


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return load_model(str(TINY), device=DEVICE)


@pytest.fixture(scope="module")
def sequences(loaded: LoadedModel) -> torch.Tensor:
    ids = loaded.tokenizer((TINY / "heldout.txt").read_text()[:9000])["input_ids"]
    return torch.tensor(ids[: 9 * LENGTH]).view(9, LENGTH)


@pytest.fixture(scope="module")
def under(loaded: LoadedModel) -> Under:
    def make(name: str) -> Any:
        model, scheme = copy.deepcopy(loaded.model), resolve(name)
        scheme.quantize(model)
        quantize_cache(model, scheme.kv_bits)
        return model

    return make


@pytest.fixture(scope="module")
def run(sequences: torch.Tensor, under: Under) -> Run:
    def running(scheme: str) -> PathResult:
        bits = resolve(scheme).kv_bits
        prompts = sequences[:4, :16]
        ends = frozenset([0])
        model = under(scheme)
        return serving_path(model, sequences, prompts, PLAN, kv_bits=bits, new=16, ends=ends)

    return running


@pytest.mark.parametrize(
    "scheme",
    [
        *("fp16", "flexq-w6ax", "w8a16", "w4a16", "fp6", "rtn-w8a8", "w6a8"),
        *("flexq-w6ax+kv8", "w8a16+kv4"),
    ],
)
def test_healthy_path_differs_only_by_rounding(run: Run, scheme: str) -> None:
    result = judged(run(scheme), [])
    assert not result["fails"], result


@pytest.mark.parametrize("damage", [name for name in DAMAGES if name != "nothing"])
def test_every_damage_of_the_path_is_found(run: Run, damage: str) -> None:
    with DAMAGES[damage](DEVICE, frozenset(["flexq", "flexq[w6a8]", "fp16"])):
        result = judged(run("flexq-w6ax"), [])
    assert result["fails"], result


def test_broken_tuned_configuration_is_found(
    run: Run, under: Under, sequences: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel = registry.resolve("flexq", "cuda")
    assert isinstance(kernel, LinearKernel)
    gemm, chosen = kernel.gemm, set()

    def recall(_: TuningMemory, key: Any, candidates: list[Config]) -> Config | None:
        if key.kernel != "flexq" or key.m > BATCH + 1:
            return None
        chosen.add(candidates[-1])
        return candidates[-1]

    def broken(x: Any, w: Any, out: torch.Tensor, **options: Any) -> None:
        gemm(x, w, out, **options)
        if options.get("config") in chosen and out.shape[0] == BATCH:
            out[-1] = 0

    monkeypatch.setattr(TuningMemory, "recall", recall)
    assert not judged(run("flexq-w6ax"), [])["fails"]
    monkeypatch.setattr(kernel, "gemm", broken, raising=False)
    launches = list(kernel_parity(under("flexq-w6ax"), sequences[0]))
    wrong = [launch for launch in launches if launch.max_rel_error > TOLERANCE]
    assert {launch.m for launch in wrong} == {BATCH}
    assert {launch.config for launch in wrong} <= chosen
    assert judged(run("flexq-w6ax"), [])["fails"]
