"""Corruptions of a model, and the limits of an accuracy policy that detect them, by size.

    python benchmarks/accuracy/corruptions.py --model DIR --data NAME=FILE … [--policy default]
        [--scheme flexq-w6ax] [--kinds sign,noise] [--context 256] [--max-tokens 8000] [--out FILE]
    python benchmarks/accuracy/corruptions.py --rows FILE...  # the table of stored rows

Each corruption is applied to the original model and to the model quantized by the scheme; both are
judged against the original by the rules of `gate accuracy`, without the policy's tasks and parity.
Prints a row for each: change of the perplexity of the first text, all of it, and of the text that
changes most; mean KL divergence (for a quantized model: percent above the scheme's own), number of
tokens that the gate used, and the limits that detected the corruption, which are those that the
undamaged model under the same scheme does not fail. damages.py has the corruptions; those of class
`artefact` damage a copy of the model's folder.

A corruption that changes the perplexity of the first text by 0.5 %, that of another text by 2 %, or
the mean KL divergence by 10 % of the scheme's own, must be detected, and every change of a folder.
Exit code 1: one was not detected; the undamaged original failed a limit; an undamaged quantized
model failed a limit of fidelity (it may fail others, because a policy may refuse the scheme); or
two sizes of a corruption had the same effect, so that it has none.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import json
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from corruption_table import print_table, stored_rows
from damages import NOTHING, WALL, Corruption
from transformers import BatchEncoding

from flexq_bench.accuracy import SUITE
from flexq_bench.accuracy.evaluator import Evaluator
from flexq_bench.accuracy.loading import LoadedModel, load_model
from flexq_bench.accuracy.perplexity import perplexity
from flexq_bench.accuracy.references import ModelReference
from flexq_bench.accuracy.results import (
    FULL_PRECISION,
    KERNELS,
    ORIGINAL,
    MetricResult,
)
from flexq_bench.accuracy.setup import PreparedModel, best_device, prepare
from flexq_bench.accuracy.texts import read_text, tokenize
from flexq_bench.ci.accuracy_gate.contract import AccuracyPolicy, CheckLimit, ModelFolders
from flexq_bench.ci.accuracy_gate.gate import AccuracyReport, gate_accuracy, planned_evaluation
from flexq_bench.ci.accuracy_gate.policy import load_accuracy_policy
from flexq_bench.ci.report_data import GateOutcome
from flexq_bench.db.engine import open_database
from flexq_bench.runs.lifecycle import new_run

MUST_PERCENT, MUST_STRATUM_PERCENT, MUST_KL = 0.5, 2.0, 0.10
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
        self._texts = [read_text(data) for data in options.data]
        self._ids = [tokenize(text, remembering) for text in self._texts]
        self._undamaged: dict[str, list[float]] = {}  # perplexity of each whole text, by scheme
        self._context = self.original.context(policy.context)
        self._reference = ModelReference(self.original, context=self._context, bos=None)
        self._own: dict[str, Any] = {}
        self._folder = tempfile.TemporaryDirectory()
        self._origin = self._prepared().origin

    def judge(
        self, corruption: Corruption, size: float, scheme: str, *, at_once: int | None = None
    ) -> tuple[AccuracyReport, int, list[float]]:
        """The gate's report on one damaged model, the tokens that it took, and the change of the
        perplexity of each whole text, percent.

        at_once: segments that the damaged model computes together; None: as the gate does.
        """
        as_it_is = scheme == FULL_PRECISION
        loaded = self.original
        folders = ModelFolders()
        if corruption.folder is not None:
            folders = self._damaged_folder(corruption)
            loaded = load_model(str(folders.judged), device=loaded.device)
        elif as_it_is:
            loaded = dataclasses.replace(loaded, model=copy.deepcopy(loaded.model))
            with torch.no_grad():
                corruption.apply(loaded.model, size, self._ids[0])
        if corruption.name == TOKENIZER:
            loaded = dataclasses.replace(loaded, tokenizer=ShiftedTokenizer(loaded.tokenizer))
        plan, missing = planned_evaluation(
            self._policy, [scheme], ORIGINAL, self._texts, None, batch=8, calibration=None, seed=0,
            through=corruption.through, reference=self._options.model,
        )  # fmt: skip
        plan = dataclasses.replace(plan, context=self._context)
        evaluator = DamagingEvaluator(
            loaded, plan, None, self._reference,
            damage=lambda model: corruption.apply(model, size, self._ids[0]), own=self._own,
        )  # fmt: skip
        evaluator.at_once = at_once
        with open_database(f"{self._folder.name}/flexq.sqlite") as database:
            # A run has each unit once: what one judgement stored would do for the next.
            origin = dataclasses.replace(self._origin, run=new_run(SUITE, "manual", ()))
            setup = PreparedModel(plan, evaluator, origin)
            report = gate_accuracy(
                self._policy, setup, database, [scheme], ORIGINAL, missing,
                on_unit=lambda unit, found: None, diagnose=False, folders=folders,
            )  # fmt: skip
        agreement = evaluator.agreement(scheme, self._texts[0].name)
        tokens = 0 if agreement is None else agreement.token_kl.size
        key = f"{scheme} {corruption.through}"
        whole = self._perplexities(evaluator.model_under(scheme).model)
        before = self._undamaged.setdefault(key, whole)  # the first judgement has no damage
        changes = [100 * (now / then - 1) for now, then in zip(whole, before, strict=True)]
        return report, tokens, changes

    def _perplexities(self, model: Any) -> list[float]:
        return [perplexity(model, ids, context=self._context).perplexity for ids in self._ids]

    def _damaged_folder(self, corruption: Corruption) -> ModelFolders:
        """A damaged copy of the model's folder, and the folder."""
        assert corruption.folder is not None  # the caller's condition
        original = Path(self._options.model)
        judged = Path(self._folder.name) / "damaged"
        shutil.rmtree(judged, ignore_errors=True)
        shutil.copytree(original, judged)
        corruption.folder(judged)
        return ModelFolders(judged, original)

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
    report: AccuracyReport,
    corruption: Corruption,
    size: float,
    scheme: str,
    tokens: int,
    changes: Sequence[float],
) -> dict[str, Any]:
    """Return the row that is printed for one judgement. changes: of whole texts, percent."""
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
    worst = max(changes, key=abs)
    must = percent is None or abs(changes[0]) >= MUST_PERCENT or abs(worst) >= MUST_STRATUM_PERCENT
    must = must or corruption.folder is not None  # every change of a folder must be named
    if kl is not None and clean:
        must = must or abs(kl / clean - 1) >= MUST_KL
    return {
        "corruption": corruption.name,
        "kind": corruption.kind,
        "size": size,
        "unit": corruption.unit,
        "scheme": scheme,
        "perplexity_percent": changes[0],
        "worst_percent": worst,
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
    names = [read_text(data).name for data in options.data]
    limits: list[CheckLimit] = []
    for limit in policy.limits:
        repeated = [other.check.key for other in limits]
        if not limit.texts and limit.check.key in ("artefacts", "weights"):
            limits.append(limit)
        elif limit.texts and limit.check.key not in repeated:
            # Each text has a perplexity; other limits are of the first.
            for name in names if limit.check.key == "perplexity" else names[:1]:
                table = limit.table.model_copy(update={"text": name})
                limits.append(dataclasses.replace(limit, table=table))
    return dataclasses.replace(
        policy,
        limits=tuple(limits),
        context=options.context or policy.context,
        max_tokens=options.max_tokens or policy.max_tokens,
    )


def judgements(options: argparse.Namespace) -> Iterator[tuple[Corruption, float, str]]:
    """Yield corruption, size and scheme of each judgement; first each scheme undamaged."""
    wanted = options.kinds.split(",") if options.kinds else None  # names or classes
    schemes = [FULL_PRECISION, *([options.scheme] if options.scheme else [])]
    shifted = dataclasses.replace(NOTHING, name=TOKENIZER, unit="off by", sizes=(1,))
    undamaged: list[str] = []
    for corruption in (NOTHING, shifted, *WALL):
        if wanted and not {corruption.name, corruption.kind} & {NOTHING.name, *wanted}:
            continue
        for scheme in schemes:
            if scheme == FULL_PRECISION and corruption.through == KERNELS:
                continue  # kernels compute what is quantized
            if scheme != FULL_PRECISION and corruption.folder is not None:
                continue
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
            report, tokens, changes = bench.judge(corruption, size, scheme)
            row = row_of(report, corruption, size, scheme, tokens, changes)
            out.write(json.dumps(row) + "\n")
            yield row
    bench.close()


def main(arguments: Sequence[str] | None = None) -> int:
    """Judge all; print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model")
    parser.add_argument("--data", nargs="+", help="texts; the first has all limits of the policy")
    parser.add_argument("--rows", type=Path, nargs="+", help="files that --out wrote: print these")
    parser.add_argument("--policy", default="default")
    parser.add_argument("--scheme", default="flexq-w6ax", help="empty: the model as it is alone")
    parser.add_argument("--kinds", help="comma-separated names or classes; default: all")
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
