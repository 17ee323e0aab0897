"""Results of a checkpoint that a person approved: a reference for later checkpoints of its kind.

A JSON file with a SHA-256 over everything else in it. It is of one original and one format for each
layer: a checkpoint of another model, or with other formats, has nothing in common with it.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from flexq_bench.accuracy.errors import AccuracyError
from flexq_bench.accuracy.perplexity import perplexity_of
from flexq_bench.accuracy.results import KL, PERPLEXITY, MetricResult
from flexq_bench.decode.kernel_linear import KernelLinear
from flexq_bench.schemes.fake_quantization import FakeQuantizedLinear

FORMAT = 1  # version of the file format


@dataclass(frozen=True, slots=True)
class ApprovedText:
    """Results on one text. perplexity, kl: mean nats per token of each segment.

    tokens: SHA-256 of the ids in the order of evaluation. parameters: of the evaluation.
    """

    tokens: str
    parameters: Mapping[str, Any]
    perplexity: tuple[float, ...]
    kl: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class ApprovedReference:
    """An approved checkpoint's results.

    model_hash: of the original. formats: number of layers by the formats of weights and
    activations; layers: SHA-256 of each layer's. content_hash: of the checkpoint. failed: limits
    that it failed when it was approved. approved_at: ISO 8601, with a time zone.
    """

    model: str
    model_hash: str
    scheme: str
    content_hash: str
    formats: Mapping[str, int]
    layers: str
    texts: Mapping[str, ApprovedText]
    approved_by: str
    approved_at: str
    failed: tuple[str, ...] = ()
    digest: str = ""  # of all other fields

    @classmethod
    def read(cls, path: Path) -> ApprovedReference:
        """Read a file. Raises AccuracyError if it is none, or does not match its hash."""
        try:
            content = json.loads(path.read_text("utf-8"))
            if content.pop("format") != FORMAT:
                raise AccuracyError(f"{path} has another format than {FORMAT}: approve again")
            texts = content.pop("texts")
            known = cls(
                texts={name: ApprovedText(**text) for name, text in texts.items()}, **content
            )
            datetime.fromisoformat(known.approved_at)
            unchanged = known.digest == known._hash()
        except OSError as error:
            raise AccuracyError(f"no approved reference {path}: {error.strerror}") from error
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise AccuracyError(
                f"{path} is no approved reference: gate accuracy --approve writes them"
            ) from error
        if not unchanged:
            raise AccuracyError(f"{path} is not what its hash says: approve the checkpoint again")
        return known

    def write(self, path: Path) -> None:
        """Write the file with its hash. Raises AccuracyError if that is not possible."""
        content = {"format": FORMAT, **asdict(replace(self, digest=self._hash()))}
        try:
            path.write_text(json.dumps(content, ensure_ascii=False) + "\n", "utf-8")
        except OSError as error:
            raise AccuracyError(f"can't write {path}: {error.strerror}") from error

    def __str__(self) -> str:
        when = self.approved_at[:10]
        return f"checkpoint {self.content_hash[:12]}, approved by {self.approved_by} on {when}"

    def differs(self, model_hash: str, formats: Mapping[str, str]) -> str:
        """Explain why a checkpoint can't be compared with it; empty: it can.

        model_hash: of its original; formats: see layer_formats.
        """
        if model_hash != self.model_hash:
            return f"it was approved for another original, {self.model}"
        if _hash_of(formats) != self.layers:
            return f"it was approved for other formats, {', '.join(self.formats)}"
        return ""

    def results(
        self, scheme: str, text: str, tokens: str, parameters: Mapping[str, Any]
    ) -> list[MetricResult]:
        """Return perplexity and KL divergence on a text. Raises AccuracyError if it has none.

        tokens, parameters: of the evaluation, as in ApprovedText.
        """
        known = self.texts.get(text)
        if known is None or known.tokens != tokens or known.parameters != dict(parameters):
            what = "no results on" if known is None else "results on other segments of"
            raise AccuracyError(f"the approved reference has {what} {text}: approve again")
        return [
            MetricResult(
                scheme, text, "", "", metric, "lower", value, None, len(values), tuple(values), {}
            )
            for metric, values in ((PERPLEXITY, known.perplexity), (KL, known.kl))
            for value in [_value(metric, values)]
        ]

    def _hash(self) -> str:
        return _hash_of({**asdict(self), "digest": ""})


def layer_formats(model: Any) -> dict[str, str]:
    """Return the formats of the weights and activations of a model's quantized layers, by name."""
    return {
        name: f"{module.layer.weight_format.name} x "
        f"{'none' if (used := module.layer.activation_format) is None else used.name}"
        for name, module in model.named_modules()
        if isinstance(module, FakeQuantizedLinear | KernelLinear)
    }


def approved_formats(formats: Mapping[str, str]) -> tuple[dict[str, int], str]:
    """Return the number of layers of each format, and the hash of every layer's."""
    counts: dict[str, int] = {}
    for name in formats.values():
        counts[name] = counts.get(name, 0) + 1
    return counts, _hash_of(formats)


def _value(metric: str, values: Sequence[float]) -> float:
    mean = math.fsum(values) / len(values)
    return perplexity_of(mean) if metric == PERPLEXITY else mean


def _hash_of(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
