"""Corruptions of a model, and the limits of an accuracy policy that detect them, by size.

    python benchmarks/accuracy/corruptions.py --model DIR --data NAME=FILE [--policy default]
        [--schemes flexq-w6ax] [--kinds sign,noise] [--texts wikitext,code] [--context 256]
        [--max-tokens 8000] [--processes 1] [--out FILE] [--seconds 600]
    python benchmarks/accuracy/corruptions.py --rows FILE...  # the table of stored rows

Each corruption is applied to the original model and to the model quantized by each scheme; all are
judged against the original by the rules of `gate accuracy`, without its tasks, parity and serving
path: first by the limits of folders and weights, then on the policy's first text, then on the
others. A corruption that is detected is not judged further. Prints a row for each: change of the
perplexity of the first text, and of the text that changes most, on the segments that the gate used
(of texts that were not evaluated: nothing); mean KL divergence (for a quantized model: percent
above the scheme's own), number of tokens, and the limits that detected the corruption, which are
those that the undamaged model under the same scheme does not fail. Rows that the file of --out has
are not judged again, so that a second command goes on where --seconds ended the first. damages.py
has the corruptions; those of class `artefact` damage a copy of the model's folder.

A corruption that changes the perplexity of the first text by 0.5 %, that of another text by 2 %, or
the mean KL divergence by 10 % of the scheme's own (at least 0.0002 nats), must be detected, and
every change of a folder.
Exit code 1: one was not detected; the undamaged original failed a limit; an undamaged quantized
model failed a limit of fidelity (it may fail others, because a policy may refuse the scheme); or
two sizes of a corruption had the same effect, so that it has none.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import json
import math
import multiprocessing
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from corruption_table import print_table, stored_rows
from damages import NOTHING, WALL, Corruption
from output import say
from transformers import BatchEncoding

from flexq_bench.accuracy import SUITE
from flexq_bench.accuracy.evaluator import Evaluator
from flexq_bench.accuracy.loading import LoadedModel, load_model
from flexq_bench.accuracy.references import ModelReference
from flexq_bench.accuracy.results import (
    FULL_PRECISION,
    KERNELS,
    ORIGINAL,
    PERPLEXITY,
    REFERENCE,
    MetricResult,
)
from flexq_bench.accuracy.setup import PreparedModel, best_device, prepare
from flexq_bench.accuracy.strata import STRATA
from flexq_bench.accuracy.texts import read_text, tokenize
from flexq_bench.ci.accuracy_gate.contract import AccuracyPolicy, CheckLimit, ModelFolders
from flexq_bench.ci.accuracy_gate.gate import (
    AccuracyReport,
    gate_accuracy,
    planned_evaluation,
    verdict_of,
)
from flexq_bench.ci.accuracy_gate.policy import load_accuracy_policy
from flexq_bench.ci.report_data import GateOutcome, exit_code_of
from flexq_bench.db.engine import open_database
from flexq_bench.runs.lifecycle import new_run

MUST_PERCENT, MUST_STRATUM_PERCENT, MUST_KL = 0.5, 2.0, 0.10
MUST_NATS = 0.0002  # smaller changes of the divergence pass: `kl` of the shipped policies
AT_ONCE = 20  # segments: a small model computes many together in the time of a few
TOKENIZER = "tokenizer"
LATER = "not evaluated yet"


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


@dataclasses.dataclass(frozen=True)
class Judgement:
    """A damaged model, and what the gate needs to judge it. file: a database's."""

    setup: PreparedModel
    scheme: str
    missing: Mapping[str, str]
    folders: ModelFolders
    file: str

    @property
    def evaluator(self) -> Evaluator:
        return self.setup.evaluator

    def report(
        self, policy: AccuracyPolicy, texts: Collection[str] | None = None
    ) -> AccuracyReport:
        """Judge by the limits of a policy. texts: those to evaluate; None: all."""
        plan = self.setup.plan
        left = () if texts is None else {text.name for text in plan.texts} - {*texts}
        # A run has each unit once: what one judgement stored would do for the next.
        origin = dataclasses.replace(self.setup.origin, run=new_run(SUITE, "manual", ()))
        with open_database(self.file) as database:
            return gate_accuracy(
                policy, dataclasses.replace(self.setup, origin=origin), database, [self.scheme],
                ORIGINAL, {**self.missing, **dict.fromkeys(left, LATER)},
                on_unit=lambda unit, found: None, diagnose=False, folders=self.folders,
            )  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Undamaged:
    """A scheme without damage. losses: of each text's segments, nats. fails: limits."""

    losses: Mapping[str, Sequence[float]]
    fails: frozenset[str]

    def changes(self, losses: Mapping[str, Sequence[float]]) -> dict[str, float]:
        """Return the change of each text's perplexity on the common segments, percent."""
        return {
            text: 100 * math.expm1(mean_difference(self.losses[text], damaged))
            for text, damaged in losses.items()
        }


def mean_difference(before: Sequence[float], after: Sequence[float]) -> float:
    """Mean of after - before over their common first segments; infinite: there are none."""
    pairs = list(zip(before, after, strict=False))
    most = 700.0  # whose exponential is a float
    return min(most, math.fsum(b - a for a, b in pairs) / len(pairs)) if pairs else most


class Bench:
    """Judges damaged models of one original. Predictions of the original are computed once."""

    def __init__(self, options: argparse.Namespace, policy: AccuracyPolicy) -> None:
        self._options, self._policy = options, policy
        device = torch.device(options.device)
        loaded = load_model(options.model, device=device)
        remembering = RememberingTokenizer(loaded.tokenizer)
        self.original = dataclasses.replace(loaded, tokenizer=remembering)
        self._text = read_text(options.data[0])
        self._ids = tokenize(self._text, remembering)
        self._undamaged: dict[str, Undamaged] = {}
        self._context = self.original.context(policy.context)
        self._reference = ModelReference(self.original, context=self._context, bos=None)
        self._own: dict[str, Any] = {}
        self._temporary = tempfile.TemporaryDirectory()
        self.folder = self._temporary.name
        self.prepared = self._prepared()

    def judge(
        self, corruption: Corruption, size: float, scheme: str, *, at_once: int | None = None
    ) -> tuple[AccuracyReport, Evaluator]:
        """The gate's report on one damaged model, and what evaluated it.

        at_once: segments that the damaged model computes together; None: as the gate does.
        """
        judgement = self._judgement(corruption, size, scheme, at_once)
        return judgement.report(self._policy), judgement.evaluator

    def _judgement(
        self, corruption: Corruption, size: float, scheme: str, at_once: int | None
    ) -> Judgement:
        as_it_is = scheme == FULL_PRECISION
        loaded = self.original
        folders = ModelFolders()
        if corruption.folder is not None:
            folders = self._damaged_folder(corruption)
            loaded = load_model(str(folders.judged), device=loaded.device)
        elif as_it_is:
            loaded = dataclasses.replace(loaded, model=copy.deepcopy(loaded.model))
            with torch.no_grad():
                corruption.apply(loaded.model, size, self._ids)
        if corruption.name == TOKENIZER:
            loaded = dataclasses.replace(loaded, tokenizer=ShiftedTokenizer(loaded.tokenizer))
        plan, missing = planned_evaluation(
            self._policy, [scheme], ORIGINAL, [self._text], None, batch=8, calibration=None, seed=0,
            through=corruption.through, reference=self._options.model,
        )  # fmt: skip
        plan = dataclasses.replace(plan, context=self._context)
        evaluator = DamagingEvaluator(
            loaded, plan, None, self._reference,
            damage=lambda model: corruption.apply(model, size, self._ids), own=self._own,
        )  # fmt: skip
        evaluator.at_once = at_once
        setup = PreparedModel(plan, evaluator, self.prepared.origin)
        return Judgement(setup, scheme, missing, folders, f"{self.folder}/{os.getpid()}.sqlite")

    def row(self, corruption: Corruption, size: float, scheme: str) -> dict[str, Any]:
        """Judge one damaged model; the row that is printed."""
        # Through kernels a damage may be one of each launch.
        at_once = None if corruption.through == KERNELS else AT_ONCE
        judgement = self._judgement(corruption, size, scheme, at_once)
        key = f"{scheme} {corruption.through}"
        undamaged = self._undamaged.get(key)
        reports: list[AccuracyReport] = []
        for policy, texts in self._stages(whole=undamaged is None):
            reports.append(judgement.report(policy, texts))
            if undamaged is not None and not _failing(reports) <= undamaged.fails:
                break
        losses = {
            result.task: result.values
            for report in reports
            for result in report.results
            if (result.scheme, result.metric) == (scheme, PERPLEXITY)
        }
        agreement = judgement.evaluator.agreement(scheme, self._text.name)
        tokens = 0 if agreement is None else agreement.token_kl.size
        if undamaged is not None:
            return row_of(reports, corruption, size, scheme, tokens, undamaged.changes(losses))
        assert corruption.name == NOTHING.name, "a scheme is first judged without damage"
        row = row_of(reports, corruption, size, scheme, tokens, dict.fromkeys(losses, 0.0))
        row["losses"] = losses
        self.remember(row)
        return row

    def remember(self, row: Mapping[str, Any]) -> None:
        """Compare later rows of this scheme with a row without damage."""
        undamaged = Undamaged(row["losses"], frozenset(row["fails"]))
        self._undamaged[f"{row['scheme']} {row['through']}"] = undamaged

    def _stages(self, *, whole: bool) -> Iterator[tuple[AccuracyPolicy, Collection[str]]]:
        """Yield limits that are judged together, and the texts that they need.

        Limits of texts stay together: they share the policy's alpha.
        """
        first, *others = self._policy.texts
        of_texts = tuple(limit for limit in self._policy.limits if limit.texts)
        rest = tuple(limit for limit in self._policy.limits if not limit.texts)
        if whole:
            yield self._policy, self._policy.texts
            return
        if rest:
            yield dataclasses.replace(self._policy, limits=rest), ()
        yield dataclasses.replace(self._policy, limits=of_texts), (first,)
        if others:
            yield dataclasses.replace(self._policy, limits=of_texts), others

    def _damaged_folder(self, corruption: Corruption) -> ModelFolders:
        """A damaged copy of the model's folder, and the folder."""
        assert corruption.folder is not None  # the caller's condition
        original = Path(self._options.model)
        judged = Path(self.folder) / f"damaged-{os.getpid()}"
        shutil.rmtree(judged, ignore_errors=True)
        shutil.copytree(original, judged)
        corruption.folder(judged)
        return ModelFolders(judged, original)

    def close(self) -> None:
        """Remove what was stored of its judgements."""
        self._temporary.cleanup()

    def _prepared(self) -> PreparedModel:
        plan, _ = planned_evaluation(
            self._policy, [FULL_PRECISION], ORIGINAL, [self._text], None, batch=8, calibration=None,
            seed=0,
        )  # fmt: skip
        return prepare(
            self._options.model, plan, device=self._options.device, dtype=None, trigger="manual"
        )


def _failing(reports: Sequence[AccuracyReport]) -> frozenset[str]:
    """Names of the limits that fail."""
    return frozenset(
        limit.check for report in reports for limit in report.with_outcome(GateOutcome.FAIL)
    )


def row_of(
    reports: Sequence[AccuracyReport],
    corruption: Corruption,
    size: float,
    scheme: str,
    tokens: int,
    changes: Mapping[str, float],
) -> dict[str, Any]:
    """Return the row that is printed for one judgement. changes: of texts, percent; empty: none."""
    checks = {
        limit.check: limit for report in reports for limit in report.judged if limit.reason != LATER
    }
    first = next(iter(changes), "")
    ppl, own_kl = (
        checks.get(f"{what} of {first}") for what in ("perplexity", "fidelity of KL mean")
    )
    kl = None if own_kl is None or own_kl.value is None else own_kl.value
    clean = None if own_kl is None else own_kl.base
    worst = max(changes, key=lambda text: abs(changes[text]), default="")
    must = corruption.folder is not None  # every change of a folder must be named
    if changes:
        must = must or not abs(changes[first]) < MUST_PERCENT
        must = must or not abs(changes[worst]) < MUST_STRATUM_PERCENT
    if kl is not None and clean is not None:
        must = must or abs(kl - clean) >= max(MUST_KL * clean, MUST_NATS)
    return {
        "corruption": corruption.name,
        "kind": corruption.kind,
        "size": size,
        "unit": corruption.unit,
        "scheme": scheme,
        "through": corruption.through,
        "perplexity_percent": changes.get(first),
        "worst_percent": changes.get(worst),
        "worst_text": worst,
        "kl": kl,
        "kl_of_scheme": clean,
        "must_be_caught": must and corruption.name != NOTHING.name,
        "fails": sorted(_failing(reports)),
        "exit_code": int(exit_code_of((verdict_of(tuple(checks.values())),))),
        "perplexity": None if ppl is None else ppl.value,
        "reason": "" if ppl is None else ppl.reason,
        "tokens": tokens,
    }


def judged_policy(options: argparse.Namespace) -> AccuracyPolicy:
    """The policy's limits of texts, folders and weights; its own text is the one that was given."""
    policy = load_accuracy_policy(options.policy)
    given = read_text(options.data[0]).name
    limits: list[CheckLimit] = []
    for limit in policy.limits:
        if not limit.texts and limit.check.key in ("artefacts", "weights"):
            limits.append(limit)
        for text in limit.texts:
            name = text if text in STRATA else given
            if options.texts is None or name in options.texts.split(","):
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
    schemes = [FULL_PRECISION, *filter(None, options.schemes.split(","))]
    shifted = dataclasses.replace(NOTHING, name=TOKENIZER, unit="off by", sizes=(1,))
    damaged = []
    for corruption in (shifted, *WALL):
        if wanted and not {corruption.name, corruption.kind} & {*wanted}:
            continue
        for scheme in schemes:
            if scheme == FULL_PRECISION and corruption.through == KERNELS:
                continue  # kernels compute what is quantized
            if scheme != FULL_PRECISION and corruption.folder is not None:
                continue
            named = scheme if scheme == FULL_PRECISION else scheme + corruption.suffix
            damaged += [
                (place, (corruption, size, named)) for place, size in enumerate(corruption.sizes)
            ]
    every = [(scheme, REFERENCE) for scheme in schemes]
    every += [(scheme, corruption.through) for _, (corruption, _, scheme) in damaged]
    for scheme, through in dict.fromkeys(every):
        yield dataclasses.replace(NOTHING, through=through), 0, scheme
    yield from (one for _, one in sorted(damaged, key=lambda placed: placed[0]))


def judged_rows(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Judge all that is not stored; each row is stored as soon as it is there."""
    ends = time.monotonic() + options.seconds
    bench = Bench(options, judged_policy(options))
    rows = stored_rows([options.out]) if options.out and options.out.exists() else ()
    stored = {(row["corruption"], row["size"], row["scheme"], row["through"]): row for row in rows}
    threads = torch.get_num_threads()

    def judge(*one: Any) -> dict[str, Any] | None:
        return bench.row(*one) if time.monotonic() < ends else None

    every = list(judgements(options))
    known = [*stored.values()]
    for before in known:
        if before["corruption"] == NOTHING.name:
            bench.remember(before)
    left = [one for one in every if key_of(one) not in stored]
    undamaged = [one for one in left if one[0].name == NOTHING.name]
    damaged = [one for one in left if one[0].name != NOTHING.name]

    def new_rows() -> Iterator[dict[str, Any] | None]:
        yield from (bench.row(*one) for one in undamaged)  # in this process: forks have them
        torch.set_num_threads(max(1, threads // options.processes))
        yield from in_processes(options.processes, damaged, judge)

    with options.out.open("w") if options.out else tempfile.TemporaryFile("w") as out:
        for row in chain(known, new_rows()):
            if row is None:
                say(f"{options.seconds:g} s are over: repeat the command with the same --out")
                break
            out.write(json.dumps(row) + "\n")
            out.flush()
            yield row
    bench.close()


def key_of(judgement: tuple[Corruption, float, str]) -> tuple[str, float, str, str]:
    """Identity of a judgement among stored rows."""
    corruption, size, scheme = judgement
    return corruption.name, size, scheme, corruption.through


def in_processes(
    count: int, every: Sequence[tuple[Any, ...]], judge: Callable[..., Any]
) -> Iterator[Any]:
    """Call `judge` with each of the arguments, in forks of this process; results as they come."""
    if count == 1:
        yield from (judge(*arguments) for arguments in every)
        return
    _IN_FORKS[:] = [(judge, every)]  # forks have a copy; a model can't be pickled
    with multiprocessing.get_context("fork").Pool(count) as pool:
        yield from pool.imap_unordered(_judge_one, range(len(every)))


_IN_FORKS: list[tuple[Callable[..., Any], Sequence[tuple[Any, ...]]]] = []


def _judge_one(index: int) -> Any:
    (judge, every), *_ = _IN_FORKS
    return judge(*every[index])


def main(arguments: Sequence[str] | None = None) -> int:
    """Judge all; print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model")
    parser.add_argument("--data", nargs=1, help="the text that is no stratum")
    parser.add_argument("--rows", type=Path, nargs="+", help="files that --out wrote: print these")
    parser.add_argument("--policy", default="default")
    parser.add_argument("--schemes", default="flexq-w6ax", help="empty: the model as it is alone")
    parser.add_argument("--texts", help="of the policy; default: all")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--kinds", help="comma-separated names or classes; default: all")
    parser.add_argument("--context", type=int)
    parser.add_argument("--max-tokens", type=int)
    parser.add_argument("--device", default=best_device())
    parser.add_argument("--out", type=Path, help="rows as JSON lines")
    parser.add_argument("--seconds", type=float, default=math.inf)
    options = parser.parse_args(arguments)
    if options.rows:
        return print_table(stored_rows(options.rows))
    if not options.model or not options.data:
        parser.error("give --model and --data, or --rows")
    return print_table(judged_rows(options))


if __name__ == "__main__":
    sys.exit(main())
