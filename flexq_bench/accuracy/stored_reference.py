"""A model's predictions on texts in one file, to compare other models without the model itself.

The file is in safetensors format. Instead of log-probabilities (one number per token and word of
the vocabulary), it contains the last hidden states, [segments, context - 1, hidden] per text in the
model's data type, and the output head, which computes logits from them. The predictions are
therefore exact, at hidden / vocabulary of the size. The header `flexq_bench` contains the metadata,
with a SHA-256 over everything.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import nn

from flexq_bench.accuracy.agreement import OutputHead, ReferenceLogits
from flexq_bench.accuracy.bos import TextTokens
from flexq_bench.accuracy.errors import AccuracyError
from flexq_bench.accuracy.loading import LoadedModel
from flexq_bench.accuracy.perplexity import PerplexityResult, text_length
from flexq_bench.accuracy.references import check_same_tokens, segments_of
from flexq_bench.accuracy.texts import Text

FORMAT = 1  # version of the file format
SUFFIX = ".safetensors"
_HEADER = "flexq_bench"
_HEAD_WEIGHT, _HEAD_BIAS = "head.weight", "head.bias"


def is_stored_reference(name: str) -> bool:
    """Return True if `name` is a file of stored predictions, not a model."""
    return name.endswith(SUFFIX) and not Path(name).is_dir()


def store_reference(
    path: Path, model: LoadedModel, predictions: Mapping[Text, tuple[TextTokens, ReferenceLogits]]
) -> str:
    """Write a model's predictions on texts; returns the content hash of the file.

    Raises AccuracyError if there are no predictions, the model's output head is not a linear layer,
    or the file can't be written.
    """
    if not predictions:
        raise AccuracyError("a reference of what? Give the texts with --data")
    heads = [logits.head for _, logits in predictions.values()]
    if not isinstance(heads[0].layer, nn.Linear):
        raise AccuracyError(f"the output head of {model.name} is no linear layer: it can't be kept")
    tensors = {_HEAD_WEIGHT: heads[0].layer.weight.detach().cpu().contiguous()}
    if heads[0].layer.bias is not None:
        tensors[_HEAD_BIAS] = heads[0].layer.bias.detach().cpu().contiguous()
    texts = []
    for number, (text, (tokens, logits)) in enumerate(predictions.items()):
        tensors[f"{number}.hidden"] = torch.stack(logits.hidden).contiguous()
        tensors[f"{number}.tokens"] = tokens.ids.to(torch.int32)
        tensors[f"{number}.nll"] = torch.tensor(logits.result.nll, dtype=torch.float64)
        texts.append(
            {
                "name": text.name,
                "data_hash": text.content_hash,
                "bos": tokens.bos,
                "context": logits.result.context,
                "seconds": logits.result.seconds,
            }
        )
    header: dict[str, Any] = {
        "format": FORMAT,
        "model": model.name,
        "model_hash": model.content_hash,
        "dtype": model.dtype,
        "cap": heads[0].cap,
        "divisor": heads[0].divisor,
        "texts": texts,
    }
    header["content_hash"] = _content_hash(header, tensors)
    partial = path.with_name(path.name + ".partial")
    try:
        save_file(tensors, partial, {_HEADER: json.dumps(header)})
        partial.chmod(0o644)  # safetensors makes files readable by their owner only
        os.replace(partial, path)
    except (OSError, SafetensorError) as error:
        partial.unlink(missing_ok=True)
        raise AccuracyError(f"can't write {path}: {error}") from error
    return str(header["content_hash"])


class StoredReference:
    """The predictions in a file. See ReferencePredictions."""

    model: LoadedModel | None = None

    def __init__(self, path: Path) -> None:
        """Read the file. Raises AccuracyError if it is no such file, or doesn't match its hash."""
        tensors, header = _read(path)
        self.name: str = header["model"]
        self.model_hash: str = header["model_hash"]
        self.content_hash: str = header["content_hash"]
        self.dtype: str = header["dtype"]
        self._path = path
        weight, bias = tensors[_HEAD_WEIGHT], tensors.get(_HEAD_BIAS)
        layer = nn.Linear(weight.shape[1], weight.shape[0], bias is not None, dtype=weight.dtype)
        layer.weight = nn.Parameter(weight, requires_grad=False)
        if bias is not None:
            layer.bias = nn.Parameter(bias, requires_grad=False)
        head = OutputHead(layer, header["cap"], header["divisor"])
        self._texts: dict[str, tuple[TextTokens, ReferenceLogits]] = {}
        self._samples: dict[str, ReferenceLogits] = {}  # in their order, by content hash
        for number, text in enumerate(header["texts"]):
            ids = tensors[f"{number}.tokens"].to(torch.int64)
            tokens = TextTokens(ids, text["bos"])
            result = PerplexityResult(
                tuple(tensors[f"{number}.nll"].tolist()), text["context"], text["seconds"]
            )
            length, count = text_length(result.context, tokens.bos), len(result.nll)
            cut = ids[: count * length].view(count, length)
            targets = tuple(cut if tokens.bos is not None else cut[:, 1:])
            hidden = tuple(tensors[f"{number}.hidden"])
            self._texts[text["data_hash"]] = (
                tokens,
                ReferenceLogits(head, hidden, targets, result),
            )

    def context(self, text: Text) -> int:
        """Return the tokens per segment of a text. Raises AccuracyError for an unknown text."""
        return self._of(text)[1].result.context

    def predictions(self, text: Text, tokens: TextTokens, count: int) -> ReferenceLogits:
        """See ReferencePredictions."""
        own, logits = self._of(text)
        order = tokens.places
        if order is not None and text.content_hash not in self._samples:
            in_order, ids = tokens.in_order, own.ids[: tokens.in_order.numel()]
            check_same_tokens(self.name, TextTokens(ids, own.bos), TextTokens(in_order, tokens.bos))
            self._samples[text.content_hash] = logits.of(order.tolist())
        if order is None:
            check_same_tokens(self.name, own, tokens)
        else:
            logits = self._samples[text.content_hash]
        if len(logits.hidden) < count:
            raise AccuracyError(
                f"{self._path} has {len(logits.hidden)} segments of {text.name}, {count} are "
                "needed: store it again with more --max-tokens, or ask for fewer"
            )
        return logits

    def known(self, text: Text) -> ReferenceLogits | None:
        """See ReferencePredictions."""
        if text.seed is not None:
            return self._samples.get(text.content_hash)
        return self._of(text)[1]

    def segments(self, text: Text) -> int:
        """Return the number of segments of a text."""
        return len(self._of(text)[1].hidden)

    def is_part(self, text: Text, max_tokens: int | None) -> bool:
        """Return True if it has fewer segments of a text than an evaluation; see segment_count."""
        tokens, logits = self._of(text)
        return len(logits.hidden) < segments_of(tokens, logits.result.context, max_tokens)

    def _of(self, text: Text) -> tuple[TextTokens, ReferenceLogits]:
        if text.content_hash not in self._texts:
            raise AccuracyError(
                f"{self._path} has no predictions on {text.name} (its content is another one): "
                "store them with accuracy --save-reference"
            )
        return self._texts[text.content_hash]


def _read(path: Path) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    try:
        with safe_open(path, framework="pt") as file:
            header = json.loads((file.metadata() or {})[_HEADER])
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except OSError as error:
        raise AccuracyError(f"no stored reference {path}: {error.strerror or error}") from error
    except (SafetensorError, KeyError, ValueError, RecursionError) as error:
        raise AccuracyError(
            f"{path} is no stored reference: accuracy --save-reference writes them; a model is "
            "named by its folder"
        ) from error
    if not isinstance(header, dict) or header.get("format") != FORMAT:
        raise AccuracyError(
            f"{path} is a stored reference of another format than {FORMAT}: store it again"
        )
    try:
        is_named = isinstance(header["model"], str)
        unchanged = is_named and header.get("content_hash") == _content_hash(header, tensors)
    except (KeyError, TypeError):  # a field is missing, or has another type
        unchanged = False
    if not unchanged:
        raise AccuracyError(f"{path} is not what its content hash says: store the reference again")
    return tensors, header


def _content_hash(header: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> str:
    """SHA-256 of everything that affects results; excludes computing times and names."""
    covered = {name: header[name] for name in ("format", "dtype", "cap", "divisor", "model_hash")}
    covered["texts"] = [
        {name: text[name] for name in ("data_hash", "bos", "context")} for text in header["texts"]
    ]
    digest = hashlib.sha256(json.dumps(covered, sort_keys=True).encode())
    for name in sorted(tensors):
        tensor = tensors[name].contiguous()
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
        digest.update(tensor.view(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
