"""The ranks of a small model: python rank_decoder.py RANKS MEETING OUT CASE...

Saves the logits of two prompts and the tokens decoded after them, by case, in OUT.0 and so on.
"""

from __future__ import annotations

import multiprocessing
import sys
from functools import cache
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))

from decoders import an_engine, prompts, small_llama, small_opt

from flexq_bench.decode.tensor_parallel import RankWeights
from flexq_bench.kernels.decoder.torch_operations import TorchOperations
from flexq_bench.kernels.runtime.ranks import ALONE, ProcessRanks, Ranks

CPU = torch.device("cpu")
NEW = 12


@cache
def a_model(kind: str) -> Any:
    """Halves of heads and feed-forward end at groups of 128."""
    if kind == "opt":
        return small_opt(CPU, hidden_size=256, word_embed_proj_dim=256, ffn_dim=512)
    return small_llama(
        CPU, kind, hidden_size=256, num_attention_heads=4, head_dim=64, intermediate_size=512
    )


def decoded(kind: str, scheme: str, ranks: Ranks = ALONE) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits FP16 [2, 10, vocab] of prompts, and the tokens after them."""

    def share(source: Any) -> Any:
        return source if ranks.count == 1 else RankWeights(source, ranks)

    engine = an_engine(a_model(kind), scheme, TorchOperations(), share=share, ranks=ranks)
    ids = prompts(2, 10, CPU)
    return engine.logits(ids), engine.generate(ids, NEW).tokens


def decode_cases(rank: int, count: int, meeting: str, out: str, cases: list[str]) -> None:
    ranks = ProcessRanks(CPU, rank, count, Path(meeting))
    results = {case: decoded(*case.split(), ranks) for case in cases}
    torch.save(results, f"{out}.{rank}")


if __name__ == "__main__":
    count, meeting, out, *cases = sys.argv[1:]
    torch.set_num_threads(1)
    for case in cases:
        a_model(case.split()[0])  # once: the ranks are forks of this process
    forks = multiprocessing.get_context("fork")
    ranks = [
        forks.Process(target=decode_cases, args=(rank, int(count), meeting, out, cases))
        for rank in range(int(count))
    ]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
    sys.exit(max(abs(process.exitcode or 0) for process in ranks))
