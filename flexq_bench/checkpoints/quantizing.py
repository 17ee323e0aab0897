"""Quantize a model into a checkpoint, one block in memory at a time."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import nn

from flexq_bench.checkpoints.config import Extension, StoredCalibration, StoredScheme
from flexq_bench.checkpoints.errors import CheckpointError
from flexq_bench.checkpoints.model_source import ModelSource
from flexq_bench.checkpoints.peak_memory import PeakMemory, freed_at_once
from flexq_bench.checkpoints.streaming import StreamedModel
from flexq_bench.checkpoints.writer import CheckpointWriter, check_target
from flexq_bench.kernels.decoder.kv import KV_BITS
from flexq_bench.kernels.formats import FP16
from flexq_bench.schemes.calibration import Calibration
from flexq_bench.schemes.fake_quantization import FakeQuantizedLinear
from flexq_bench.schemes.layer_formats import LayerFormats
from flexq_bench.schemes.scheme import Progress, Scheme


@dataclass(frozen=True, slots=True)
class WrittenCheckpoint:
    """A written checkpoint. quantized_bytes: of the quantized layers, of `weights` values.

    stored_bytes: of all tensors. seconds: duration. peak_bytes: peak memory, counted after the
    model's configuration and tokenizer were read; peak_of: what was counted.
    """

    folder: Path
    content_hash: str
    weights: int
    quantized_bytes: int
    stored_bytes: int
    seconds: float
    peak_bytes: int
    peak_of: str

    @property
    def bits_per_weight(self) -> float:
        """Bits per quantized weight, including scales and all other tensors of its layer."""
        return self.quantized_bytes * 8 / self.weights


def quantize_checkpoint(
    source: ModelSource,
    scheme: Scheme,
    folder: Path,
    *,
    calibration: Calibration | None = None,
    kv_bits: int | None = None,
    seed: int = 0,
    device: torch.device,
    dtype: torch.dtype,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> WrittenCheckpoint:
    """Quantize the model by the scheme, and write the result.

    kv_bits: of cached keys and values; None: the scheme's. dtype: of the weights during
    quantization.

    Raises CheckpointError or QuantizeError with one line; no partial result is left.
    """
    started = time.monotonic()
    check_target(folder, overwrite=overwrite)  # before anything is read
    streamed = StreamedModel(source, device, dtype)
    layout = streamed.layout
    formats = {scheme.layer_formats(role, layout.gated) for role in layout.roles}
    if formats == {LayerFormats(FP16)}:
        raise CheckpointError(f"{scheme.name} quantizes nothing: pick another scheme")
    learned = None
    if calibration is not None and scheme.needs_calibration:
        learned = StoredCalibration.of(calibration, device, dtype)
    kv_bits = scheme.kv_bits if kv_bits is None else kv_bits
    if kv_bits not in KV_BITS:
        raise CheckpointError(f"keys and values have 16, 8 or 4 bits, got {kv_bits}")
    extension = Extension(
        scheme=StoredScheme(
            name=scheme.name, version=scheme.version, options=asdict(scheme.options), seed=seed
        ),
        kv_bits=kv_bits,  # type: ignore[arg-type]
        layers={},
        synthetic=source.is_synthetic,
        separated=streamed.is_separated or None,
        calibration=learned,
    )
    with (
        TemporaryDirectory() as scratch,
        CheckpointWriter(
            folder,
            source.config_dict() | ({"tie_word_embeddings": False} if scheme.changes_ends else {}),
            extension,
            overwrite=overwrite,
        ) as writer,
    ):
        for path in source.companions(Path(scratch)):
            writer.add_file(path)
        writer.leave_as_is(_other_linears(streamed))
        with freed_at_once(device), PeakMemory(device) as peak:
            if not scheme.changes_ends:
                _write_ends(streamed.read_ends(), writer)
            _quantize_blocks(streamed, scheme, writer, calibration, seed, progress)
            if scheme.changes_ends:
                _write_ends(streamed.changed_ends(), writer)
        content_hash = writer.finish()
    return WrittenCheckpoint(
        writer.folder,
        content_hash,
        sum(site.n * site.k for site in layout.sites),
        writer.layer_bytes,
        writer.stored_bytes,
        time.monotonic() - started,
        peak.bytes,
        peak.meaning,
    )


def _write_ends(ends: Iterable[tuple[str, torch.Tensor]], writer: CheckpointWriter) -> None:
    for name, tensor in ends:
        writer.add_tensor(name, tensor)
    writer.close_shard()


def _quantize_blocks(
    streamed: StreamedModel,
    scheme: Scheme,
    writer: CheckpointWriter,
    calibration: Calibration | None,
    seed: int,
    progress: Progress | None,
) -> None:
    def write(index: int) -> None:
        _write_block(streamed, index, writer)
        writer.close_shard()
        streamed.leave(index)

    if scheme.needs_calibration or scheme.changes_ends:
        streamed.load_ends()
    with streamed.streamed():
        scheme.quantize(
            streamed.module,
            calibration,
            seed=seed,
            progress=progress,
            before_block=streamed.enter,
            on_block=write,
            layout=streamed.layout,
        )


def _write_block(streamed: StreamedModel, index: int, writer: CheckpointWriter) -> None:
    block, prefix = streamed.block(index), f"{streamed.layout.path}.{index}."
    quantized = {
        name: module.layer
        for name, module in block.named_modules()
        if isinstance(module, FakeQuantizedLinear)
    }
    for name, layer in quantized.items():
        writer.add_layer(prefix + name, layer)
    computed = dict(block.named_buffers())
    for name, tensor in block.state_dict().items():
        if name.rpartition(".")[0] not in quantized:
            as_is = name in computed or streamed.keeps_fp32(prefix + name)
            writer.add_tensor(prefix + name, tensor, as_is=as_is)


def _other_linears(streamed: StreamedModel) -> list[str]:
    """Linear layers that no scheme quantizes: the head, projections of embeddings."""
    sites = {site.name for site in streamed.layout.sites}
    return [
        name
        for name, module in streamed.module.named_modules()
        if isinstance(module, nn.Linear) and name not in sites
    ]
