"""Upper bound of the speedup of one scheme over another, from the bytes that a step reads.

    python benchmarks/decode/bounds.py --model llama-13b --batch 1,4,8 --tokens 128,527,1024

Weights and the output head are read once per step, keys and values once per sequence.
`flexq-w6ax+kv8` has a KV cache of 8 bits; ratios are to the last scheme.
"""

from __future__ import annotations

import argparse
import sys

from traffic import step_bytes

from flexq_bench.decode.case import open_model, read_scheme

_GB = 1e9


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="llama-13b")
    parser.add_argument("--schemes", default="fp16,smoothquant-w8a8,flexq-w6ax")
    parser.add_argument("--batch", default="1,4,8")
    parser.add_argument("--tokens", default="128,527,1024")
    parser.add_argument("--kv-bits", type=int, default=16)
    arguments = parser.parse_args()
    names = arguments.schemes.split(",")
    schemes = [read_scheme(name, arguments.kv_bits) for name in names]
    sources = [open_model(arguments.model, scheme.scheme, 0) for scheme in schemes]
    rows = [["batch", "tokens", *(f"{s} GB" for s in names), *(f"× {s}" for s in names[:-1])]]
    for batch in (int(b) for b in arguments.batch.split(",")):
        for tokens in (int(t) for t in arguments.tokens.split(",")):
            read = [
                step_bytes(source, batch, tokens, scheme.kv_bits)
                for source, scheme in zip(sources, schemes, strict=True)
            ]
            ratios = [f"{size / read[-1]:.2f}" for size in read[:-1]]
            rows.append([str(batch), str(tokens), *(f"{b / _GB:.1f}" for b in read), *ratios])
    sys.stdout.writelines("| " + " | ".join(row) + " |\n" for row in rows)


if __name__ == "__main__":
    main()
