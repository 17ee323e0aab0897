"""Corruptions of a model, and the limits of an accuracy policy that detect them, by size.

    python benchmarks/accuracy/corruptions.py --model DIR --data NAME=FILE [--policy default]
        [--scheme flexq-w6ax] [--kinds sign,noise] [--context 256] [--max-tokens 8000] [--out FILE]
    python benchmarks/accuracy/corruptions.py --rows FILE...  # the table of stored rows

Each corruption is applied to the original model and to the model quantized by the scheme; both are
judged against the original by the rules of `gate accuracy`, without the policy's tasks and parity.
Prints a row for each: change of the perplexity, mean KL divergence (for a quantized model: percent
above the scheme's own), number of tokens that the gate used, and the limits that detected the
corruption, which are those that the undamaged model under the same scheme does not fail.

A corruption that changes the perplexity by 0.5 %, or the mean KL divergence by 10 % of the scheme's
own, must be detected. Exit code 1: one was not detected; the undamaged original failed a limit; an
undamaged quantized model failed a limit of fidelity (it may fail others, because a policy may
refuse the scheme); or two sizes of a corruption had the same effect, so that it has none.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import json
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from corruption_table import NOTHING_DONE, print_table, stored_rows
from transformers import BatchEncoding

from flexq_bench.accuracy import SUITE
from flexq_bench.accuracy.evaluator import Evaluator
from flexq_bench.accuracy.loading import LoadedModel, load_model
from flexq_bench.accuracy.references import ModelReference
from flexq_bench.accuracy.results import (
    FULL_PRECISION,
    KERNELS,
    ORIGINAL,
    REFERENCE,
    MetricResult,
    Through,
)
from flexq_bench.accuracy.setup import PreparedModel, best_device, prepare
from flexq_bench.accuracy.texts import read_text
from flexq_bench.ci.accuracy_gate.contract import AccuracyPolicy
from flexq_bench.ci.accuracy_gate.gate import AccuracyReport, gate_accuracy, planned_evaluation
from flexq_bench.ci.accuracy_gate.policy import load_accuracy_policy
from flexq_bench.ci.report_data import GateOutcome
from flexq_bench.db.engine import open_database
from flexq_bench.kernels.contract import LinearKernel
from flexq_bench.kernels.formats import NumberFormat, quantize
from flexq_bench.runs.lifecycle import new_run

MUST_PERCENT, MUST_KL = 0.5, 0.10
Damage = Callable[[Any, float], None]  # of a model of transformers, in place


def layer(model: Any, kind: str, block: int = 1) -> Any:
    """A linear layer, quantized or not, of a kind, in the second block (or the only one)."""
    names = [n for n, _ in model.named_modules() if n.endswith(f".{kind}")]
    return model.get_submodule(names[min(block, len(names) - 1)])


def linears(model: Any) -> Iterator[Any]:
    """Every linear layer of the blocks."""
    for name, module in model.named_modules():
        if name.endswith("_proj") and isinstance(getattr(module, "weight", None), torch.Tensor):
            yield module


def flip_sign(model: Any, _: float) -> None:
    layer(model, "down_proj").weight.neg_()


def zero_head(model: Any, heads: float) -> None:
    width = model.config.hidden_size // model.config.num_attention_heads
    layer(model, "o_proj").weight[:, : int(heads) * width] = 0


def swap_rows(model: Any, pairs: float) -> None:
    weight = layer(model, "up_proj").weight
    count = int(pairs)
    kept = weight[:count].clone()
    weight[:count] = weight[count : 2 * count]
    weight[count : 2 * count] = kept


def scale_group(model: Any, factor: float) -> None:
    layer(model, "down_proj").weight[0, :128] *= factor


def add_noise(model: Any, share: float) -> None:
    generator = torch.Generator().manual_seed(0)
    for module in linears(model):
        weight = module.weight
        noise = torch.randn(weight.shape, generator=generator).to(weight)
        weight += share * weight.float().std().to(weight.dtype) * noise


def change_rotary_base(model: Any, factor: float) -> None:
    rotary = model.get_submodule(f"{model.base_model_prefix}.rotary_emb")
    base = model.config.rope_parameters["rope_theta"]
    exponent = torch.log(torch.tensor(base * factor)) / torch.log(torch.tensor(float(base)))
    rotary.inv_freq.copy_(rotary.inv_freq ** exponent.to(rotary.inv_freq))


def round_layer(model: Any, bits: float) -> None:
    weight = layer(model, "down_proj").weight
    rounded = quantize(weight.float(), NumberFormat(int(bits), 128)).dequantize(torch.float32)
    weight.copy_(rounded.to(weight))


def put_outlier(model: Any, factor: float) -> None:
    weight = layer(model, "gate_proj").weight
    weight[0, 0] = factor * weight.abs().max()


def change_epsilon(model: Any, factor: float) -> None:
    for module in model.modules():
        if hasattr(module, "variance_epsilon"):
            module.variance_epsilon *= factor


def scale_keys(model: Any, factor: float) -> None:
    """A cache whose scales of keys are off returns keys that are: as if k_proj had made them."""
    for name, module in model.named_modules():
        if name.endswith(".k_proj"):
            module.register_forward_hook(lambda _, __, y: y * factor)


class TailCut:
    """A kernel that leaves the last rows of a launch at zero."""

    def __init__(self, kernel: LinearKernel, rows: int) -> None:
        self._kernel, self._rows = kernel, rows

    def __getattr__(self, name: str) -> Any:
        return getattr(self._kernel, name)

    def gemm(
        self, activation: Any, weight: Any, out: torch.Tensor, *arguments: Any, **named: Any
    ) -> None:
        self._kernel.gemm(activation, weight, out, *arguments, **named)
        out[-self._rows :] = 0


def spoil_tail(model: Any, rows: float) -> None:
    """Leave the last rows of a launch at zero, in the second block's down_proj."""
    decoder = model.forward.decoder  # through kernels decode's forward pass computes all
    blocks = list(decoder.model.blocks)
    index = min(1, len(blocks) - 1)
    down = blocks[index].down
    cut = dataclasses.replace(down, kernel=TailCut(down.kernel, int(rows)))
    blocks[index] = dataclasses.replace(blocks[index], down=cut)
    decoder.model = dataclasses.replace(decoder.model, blocks=tuple(blocks))


@dataclasses.dataclass(frozen=True)
class Corruption:
    """damage at each of the sizes. weights: it changes weights, which kernels hold packed."""

    name: str
    unit: str
    damage: Damage
    sizes: tuple[float, ...]
    through: Through = REFERENCE
    suffix: str = ""  # of the scheme


WALL = (
    Corruption("sign", "layers", flip_sign, (1,)),
    Corruption("head", "heads zeroed", zero_head, (1,)),
    Corruption("rows", "pairs swapped", swap_rows, (1, 8)),
    Corruption("scale", "× one group", scale_group, (1.1, 2.0, 8.0)),
    Corruption("noise", "of σ, all weights", add_noise, (0.003, 0.01, 0.03)),
    Corruption("rotary", "× base", change_rotary_base, (1.02, 1.2, 10.0)),
    Corruption("bits", "bits, one layer", round_layer, (5, 4, 3)),
    Corruption("outlier", "× largest weight", put_outlier, (2.0, 10.0, 100.0)),
    Corruption("epsilon", "× ε of norms", change_epsilon, (10.0, 1000.0)),
    Corruption("cache", "× scale of keys", scale_keys, (1.01, 1.1), suffix="+kv8"),
    Corruption("tail", "rows of a launch", spoil_tail, (1, 8), through=KERNELS),
)
NOTHING = Corruption(NOTHING_DONE, "", lambda model, size: None, (0,))
TOKENIZER = "tokenizer"


class RememberingTokenizer:
    """A tokenizer that reads each text once: a judgement of a GPU takes less time than that."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._read: dict[str, list[int]] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def __call__(self, content: str, **named: Any) -> BatchEncoding:
        if content not in self._read:
            self._read[content] = list(self._tokenizer(content, **named).input_ids)
        return BatchEncoding({"input_ids": self._read[content]})


class ShiftedTokenizer:
    """A tokenizer whose tokens are each the next one's number."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        made = self._tokenizer(*arguments, **named)
        made["input_ids"] = [(i + 1) % self._tokenizer.vocab_size for i in made["input_ids"]]
        return made


class DamagingEvaluator(Evaluator):
    """Damages what a scheme has quantized. own: what the scheme makes of the original, kept."""

    def __init__(self, *arguments: Any, damage: Callable[[Any], None], own: dict[str, Any]) -> None:
        super().__init__(*arguments)
        self._damage, self._own = damage, own
        self._damaged: list[Any] = []

    def model_under(self, scheme: str) -> LoadedModel:
        loaded = super().model_under(scheme)
        if scheme not in (FULL_PRECISION, ORIGINAL) and loaded.model not in self._damaged:
            with torch.no_grad():
                self._damage(loaded.model)
            self._damaged = [loaded.model]
        return loaded

    def reproduced(self, scheme: str, text_name: str, count: int) -> list[MetricResult]:
        if scheme == FULL_PRECISION:
            return super().reproduced(scheme, text_name, count)
        key = f"{scheme} {text_name}"
        kept = self._own.get(key)
        if kept is None or len(kept[0].values) < count:
            self._own[key] = super().reproduced(scheme, text_name, count)
        return list(self._own[key])


class Bench:
    """Judges damaged models of one original. Predictions of the original are computed once."""

    def __init__(self, options: argparse.Namespace, policy: AccuracyPolicy) -> None:
        self._options, self._policy = options, policy
        device = torch.device(options.device)
        loaded = load_model(options.model, device=device)
        remembering = RememberingTokenizer(loaded.tokenizer)
        self.original = dataclasses.replace(loaded, tokenizer=remembering)
        self._texts = [read_text(options.data)]
        self._context = self.original.context(policy.context)
        self._reference = ModelReference(self.original, context=self._context, bos=None)
        self._own: dict[str, Any] = {}
        self._folder = tempfile.TemporaryDirectory()
        self._origin = self._prepared().origin

    def judge(
        self, corruption: Corruption, size: float, scheme: str, *, at_once: int | None = None
    ) -> tuple[AccuracyReport, int]:
        """The gate's report on one damaged model, and the tokens that it took.

        at_once: segments that the damaged model computes together; None: as the gate does.
        """
        as_it_is = scheme == FULL_PRECISION
        loaded = self.original
        if as_it_is:
            loaded = dataclasses.replace(loaded, model=copy.deepcopy(loaded.model))
            with torch.no_grad():
                corruption.damage(loaded.model, size)
        if corruption.name == TOKENIZER:
            loaded = dataclasses.replace(loaded, tokenizer=ShiftedTokenizer(loaded.tokenizer))
        plan, missing = planned_evaluation(
            self._policy, [scheme], ORIGINAL, self._texts, None, batch=8, calibration=None, seed=0,
            through=corruption.through, reference=self._options.model,
        )  # fmt: skip
        plan = dataclasses.replace(plan, context=self._context)
        evaluator = DamagingEvaluator(
            loaded, plan, None, self._reference,
            damage=lambda model: corruption.damage(model, size), own=self._own,
        )  # fmt: skip
        evaluator.at_once = at_once
        with open_database(f"{self._folder.name}/flexq.sqlite") as database:
            # A run has each unit once: what one judgement stored would do for the next.
            origin = dataclasses.replace(self._origin, run=new_run(SUITE, "manual", ()))
            setup = PreparedModel(plan, evaluator, origin)
            report = gate_accuracy(
                self._policy, setup, database, [scheme], ORIGINAL, missing,
                on_unit=lambda unit, found: None, diagnose=False,
            )  # fmt: skip

        agreement = evaluator.agreement(scheme, self._texts[0].name)
        return report, 0 if agreement is None else agreement.token_kl.size

    def close(self) -> None:
        """Remove what was stored of its judgements."""
        self._folder.cleanup()

    def _prepared(self) -> PreparedModel:
        plan, _ = planned_evaluation(
            self._policy, [FULL_PRECISION], ORIGINAL, self._texts, None, batch=8, calibration=None,
            seed=0,
        )  # fmt: skip
        plan = dataclasses.replace(plan, max_tokens=1)
        return prepare(
            self._options.model, plan, device=self._options.device, dtype=None, trigger="manual"
        )


def row_of(
    report: AccuracyReport, corruption: Corruption, size: float, scheme: str, tokens: int
) -> dict[str, Any]:
    """Return the row that is printed for one judgement."""
    checks = {judgement.check: judgement for judgement in report.judged}
    ppl = next((c for n, c in checks.items() if n.startswith("perplexity")), None)
    own_ppl, own_kl = (
        next((c for n, c in checks.items() if n.startswith(f"fidelity of {what}")), None)
        for what in ("perplexity", "KL mean")
    )
    failing = [n.split(" of ")[0] if not n.startswith("fidelity") else " ".join(n.split()[:3])
               for n, c in checks.items() if c.outcome is GateOutcome.FAIL]  # fmt: skip
    percent = None if own_ppl is None else own_ppl.change
    kl = None if own_kl is None or own_kl.value is None else own_kl.value
    clean = None if own_kl is None else own_kl.base
    must = percent is None or abs(percent) >= MUST_PERCENT
    if kl is not None and clean:
        must = must or abs(kl / clean - 1) >= MUST_KL
    return {
        "corruption": corruption.name,
        "size": size,
        "unit": corruption.unit,
        "scheme": scheme,
        "perplexity_percent": percent,
        "kl": kl,
        "kl_of_scheme": clean,
        "must_be_caught": must and corruption.name != NOTHING.name,
        "fails": failing,
        "exit_code": int(report.exit_code),
        "perplexity": None if ppl is None else ppl.value,
        "reason": "" if ppl is None else ppl.reason,
        "tokens": tokens,
    }


def judged_policy(options: argparse.Namespace) -> AccuracyPolicy:
    """The first limit of each check of a text, on the text that was given."""
    policy = load_accuracy_policy(options.policy)
    name = read_text(options.data).name

    first = {limit.check.key: limit for limit in reversed(policy.limits) if limit.texts}
    return dataclasses.replace(
        policy,
        limits=tuple(
            dataclasses.replace(limit, table=limit.table.model_copy(update={"text": name}))
            for limit in policy.limits
            if limit in first.values()
        ),
        context=options.context or policy.context,
        max_tokens=options.max_tokens or policy.max_tokens,
    )


def judgements(options: argparse.Namespace) -> Iterator[tuple[Corruption, float, str]]:
    """Yield corruption, size and scheme of each judgement; first each scheme undamaged."""
    wanted = options.kinds.split(",") if options.kinds else None
    schemes = [FULL_PRECISION, *([options.scheme] if options.scheme else [])]
    shifted = dataclasses.replace(NOTHING, name=TOKENIZER, unit="off by", sizes=(1,))
    undamaged: list[str] = []
    for corruption in (NOTHING, shifted, *WALL):
        if wanted and corruption.name not in (NOTHING.name, *wanted):
            continue
        for scheme in schemes:
            if scheme == FULL_PRECISION and corruption.through == KERNELS:
                continue  # kernels compute what is quantized
            named = scheme if scheme == FULL_PRECISION else scheme + corruption.suffix
            if named not in undamaged:
                undamaged.append(named)
                yield NOTHING, 0, named
            if corruption is not NOTHING:
                for size in corruption.sizes:
                    yield corruption, size, named


def judged_rows(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Judge all; the rows as they are found, which are stored, too."""
    bench = Bench(options, judged_policy(options))
    with options.out.open("w") if options.out else tempfile.TemporaryFile("w") as out:
        for corruption, size, scheme in judgements(options):
            report, tokens = bench.judge(corruption, size, scheme)
            row = row_of(report, corruption, size, scheme, tokens)
            out.write(json.dumps(row) + "\n")
            yield row
    bench.close()


def main(arguments: Sequence[str] | None = None) -> int:
    """Judge all; print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name in ("--model", "--data"):
        parser.add_argument(name)
    parser.add_argument("--rows", type=Path, nargs="+", help="files that --out wrote: print these")
    parser.add_argument("--policy", default="default")
    parser.add_argument("--scheme", default="flexq-w6ax", help="empty: the model as it is alone")
    parser.add_argument("--kinds", help="comma-separated names of corruptions; default: all")
    parser.add_argument("--context", type=int)
    parser.add_argument("--max-tokens", type=int)
    parser.add_argument("--device", default=best_device())
    parser.add_argument("--out", type=Path, help="rows as JSON lines")
    options = parser.parse_args(arguments)
    if options.rows:
        return print_table(stored_rows(options.rows))
    if not options.model or not options.data:
        parser.error("give --model and --data, or --rows")
    return print_table(judged_rows(options))


if __name__ == "__main__":
    sys.exit(main())
