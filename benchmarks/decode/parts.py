"""Time of each part of a block in stored decodes, and the time to read its bytes.

    python benchmarks/decode/parts.py examples/h200/decode-llama.jsonl.gz --scheme flexq-w6ax

Microseconds for each block of the model. over: the time beyond reading at --rate. of step: the same
over all blocks, as a share of the time of a token. The step becomes faster by this share if the
part becomes as fast as reading its bytes.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from flexq_bench.db.exchange import read_records
from flexq_bench.db.records import DecodeRecord
from flexq_bench.decode.architecture import DecoderArchitecture, of_catalog
from flexq_bench.decode.loading import linear_kernel, packed_bytes
from flexq_bench.decode.weights import layer_sizes
from flexq_bench.kernels.decoder.kv import token_bytes
from flexq_bench.workloads.models import get_model

_ATTENTION = "attention"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("records", type=Path)
    parser.add_argument("--model", default="llama-13b")
    parser.add_argument("--scheme", default="flexq-w6ax")
    parser.add_argument("--rate", type=float, default=4.43, help="TB/s")
    arguments = parser.parse_args()
    architecture = of_catalog(get_model(arguments.model))
    _say("batch", "new", "KV", "part", "µs", "bytes", "over", "of step")
    for record in read_records(arguments.records):
        if not isinstance(record, DecodeRecord):
            continue
        is_asked = (record.model, record.scheme) == (arguments.model, arguments.scheme)
        if is_asked and record.parts and record.token_ms:
            _parts(record, architecture, arguments.rate)


def _parts(record: DecodeRecord, architecture: DecoderArchitecture, rate: float) -> None:
    layers = architecture.dimensions.layers
    read = _bytes_of_a_block(record, architecture)
    for part in record.parts:
        took = part["us"] / layers
        if part["count"] < layers:  # before and behind all blocks
            continue
        reads = read.get(part["part"], 0) / rate / 1e6
        over = took - reads
        of_step = over * layers / record.token_ms / 1000
        case = str(record.batch), str(record.new_tokens), str(record.kv_bits)
        _say(*case, part["part"], *(f"{t:.1f}" for t in (took, reads, over)), f"{of_step:.1%}")


def _bytes_of_a_block(record: DecodeRecord, architecture: DecoderArchitecture) -> dict[str, int]:
    of_model = architecture.dimensions
    weights = {
        name: packed_bytes(
            n, k, linear_kernel(record.kernels[name].split(",")[0], "cpu").spec.weight
        )
        for name, n, k in layer_sizes(architecture)
    }
    tokens = record.prompt_tokens + record.new_tokens // 2  # where the profiler looked
    of_token = 2 * of_model.kv_heads * token_bytes(architecture.head_dim, record.kv_bits)
    return {**weights, _ATTENTION: record.batch * tokens * of_token}


def _say(*cells: str) -> None:
    widths = (5, 5, 3, 13, 6, 6, 6, 7)
    line = " ".join(cell.rjust(width) for cell, width in zip(cells, widths, strict=True))
    sys.stdout.write(line + "\n")


if __name__ == "__main__":
    main()
