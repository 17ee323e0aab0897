"""Two processes with half of every layer compute what one computes, through gloo."""

from __future__ import annotations

import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
import torch
from decoders import VOCAB, small_llama
from rank_decoder import a_model, decoded

from flexq_bench.decode.case import CachedScheme, Setup
from flexq_bench.decode.measurement import cases_of, decode_all
from flexq_bench.decode.rounded_weights import RoundedWeights
from flexq_bench.decode.tensor_parallel import RankWeights, share_of, with_row_ends
from flexq_bench.errors import UsageError
from flexq_bench.kernels.errors import ShapeError
from flexq_bench.kernels.formats import NumberFormat, quantize
from flexq_bench.kernels.runtime.ranks import Ranks
from flexq_bench.repository.provenance import current_commit
from flexq_bench.runs.lifecycle import new_run
from flexq_bench.schemes.registry import resolve

CPU = torch.device("cpu")
SCRIPT = Path(__file__).with_name("rank_decoder.py")
# Two partial sums are rounded to FP16 instead of one sum, in each of four layers.
ROUNDED = (0.02, 0.004)  # maximum and mean of the differences of logits
# That may move a code of the next layer, whose steps are 1/32 of a group's largest value or 1/128
# of a row's. The quantization itself moves these logits by 0.14, 0.12 and 0.04 in the mean.
RECODED = (0.4, 0.06)
CASES = {
    "llama fp16": ROUNDED,
    "qwen3 fp16": ROUNDED,
    "opt fp16": ROUNDED,
    "mistral w8a16": ROUNDED,
    "qwen2 fp6": ROUNDED,
    "llama flexq-w6ax": RECODED,
    "llama dual-w6a8": RECODED,
    "qwen2 smoothquant-w8a8": RECODED,
}
# Biases, rows and groups of weights, and sums of codes; the others differ in one of these.
FAST = ("opt fp16", "mistral w8a16", "llama flexq-w6ax", "qwen2 smoothquant-w8a8")
SLOW = tuple(case for case in CASES if case not in FAST)


class Rank(Ranks):
    """A rank whose weights only are of interest."""

    def __init__(self, rank: int, count: int = 2) -> None:
        self.rank, self.count = rank, count


@pytest.fixture(scope="module")
def of_two(tmp_path_factory):
    """of_two(cases): what each rank saved, by case; started once for the same cases."""

    @cache
    def run(cases):
        folder = tmp_path_factory.mktemp("ranks")
        out = folder / "logits"
        command = [sys.executable, str(SCRIPT), "2", str(folder / "meeting"), str(out), *cases]
        done = subprocess.run(command, stderr=subprocess.PIPE, text=True, timeout=240)
        assert done.returncode == 0, done.stderr
        return [torch.load(f"{out}.{r}") for r in range(2)]

    return run


@pytest.mark.parametrize(
    "case", [*FAST, *(pytest.param(case, marks=pytest.mark.slow) for case in SLOW)]
)
def test_logits_of_two_ranks_equal_those_of_one(of_two, case):
    first, second = of_two(FAST if case in FAST else SLOW)
    logits, tokens = first[case]
    wanted, _ = decoded(*case.split())

    assert logits.shape == (2, 10, VOCAB)
    difference, (most, mean) = (logits.float() - wanted.float()).abs(), CASES[case]
    assert float(difference.max()) <= most
    assert float(difference.mean()) <= mean
    other_logits, other_tokens = second[case]
    assert torch.equal(logits, other_logits)
    assert torch.equal(tokens, other_tokens)


def test_shares_of_a_block_are_its_codes():
    source = RoundedWeights(a_model("llama").source, resolve("flexq-w6ax"))
    whole = source.block(0, CPU).linears
    parts = [RankWeights(source, Rank(r)).block(0, CPU).linears for r in range(2)]

    for name in ("o_proj", "down_proj"):
        codes = torch.cat([part[name].weight.dequantize() for part in parts], dim=1)
        assert torch.equal(codes, whole[name].weight.dequantize())
    heads = [part["qkv_proj"].weight.dequantize().split([128, 64, 64]) for part in parts]
    rows = torch.cat([torch.cat(pair) for pair in zip(*heads, strict=True)])
    assert torch.equal(rows, whole["qkv_proj"].weight.dequantize())


class Maxima(Rank):
    """A rank that knows what the others would send."""

    def __init__(self, rank, largest):
        super().__init__(rank)
        self._largest = largest

    def largest(self, x):
        return self._largest


@pytest.mark.parametrize("scheme", ["smoothquant-w8a8", "fp8", "dual-w6a8"])
def test_activations_of_two_shares_are_those_of_the_whole_row(scheme):
    source = RoundedWeights(a_model("llama").source, resolve(scheme))
    whole = source.block(0, CPU).linears["down_proj"]
    x = torch.randn(5, 512, generator=torch.Generator().manual_seed(0)).half()
    x[1, 7], x[2, 400] = 9, -9
    ends = torch.stack([x.amax(1), -x.amin(1)], dim=1)
    expected, y = whole.activation(x), torch.zeros(5, 256)
    for rank, part in enumerate(x.chunk(2, dim=1)):
        layer = RankWeights(source, Rank(rank)).block(0, CPU).linears["down_proj"]
        wide = with_row_ends(part, layer.weight.k, Maxima(rank, ends.clone()))

        rounded = layer.activation(wide)

        assert torch.equal(rounded[:, :256], expected.chunk(2, dim=1)[rank])
        y += rounded @ layer.weight.dequantize(torch.float32).T
    wanted = expected @ whole.weight.dequantize(torch.float32).T
    torch.testing.assert_close(y, wanted, rtol=1e-5, atol=1e-5 * float(wanted.abs().max()))


def test_heads_that_do_not_divide_are_refused():
    with pytest.raises(UsageError, match="2 KV heads, which 3 GPUs can't share"):
        share_of(small_llama(CPU).source.architecture, 3)


def test_a_cut_group_is_refused():
    weights = quantize(torch.randn(16, 192), NumberFormat(6, 128))

    with pytest.raises(ShapeError, match="cut a group of 128"):
        weights.slice_columns(0, 96)
    assert torch.equal(weights.slice_columns(128, 192).dequantize(), weights.dequantize()[:, 128:])


def test_a_layer_whose_groups_two_gpus_would_cut_is_refused():
    source = RoundedWeights(small_llama(CPU).source, resolve("flexq-w6ax"))

    with pytest.raises(UsageError, match="o_proj of small can't be shared by 2 GPUs"):
        RankWeights(source, Rank(0)).block(0, CPU)


@pytest.mark.slow
def test_decode_of_two_devices_is_recorded_as_theirs():
    model = str(Path(__file__).parents[2] / "examples" / "models" / "tiny-llama")
    setup = Setup(model, (CachedScheme("fp16"),), "cpu", gpus=2)
    cases = cases_of(setup, (2,), (5,), (8,))
    run = new_run("decode", "manual", [case.key for case in cases])

    [record] = decode_all(setup, cases, run, current_commit(), {})

    assert record.status == "ok", record.detail
    assert record.device.sku.startswith("2x ")
    assert len(record.processes[0].step_ms) == 7
