from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from flexq_bench.cli.app import main


@pytest.fixture(scope="session", autouse=True)
def _one_thread():
    torch.set_num_threads(1)


@pytest.fixture
def a_model():
    """A LLaMA with random weights."""

    def build(*, seed: int = 0, layers: int = 2, vocabulary: int = 96) -> LlamaForCausalLM:
        torch.manual_seed(seed)
        config = LlamaConfig(
            vocab_size=vocabulary,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=layers,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=64,
            initializer_range=0.4,
        )
        return LlamaForCausalLM(config).eval()

    return build


@pytest.fixture
def some_tokens():
    """tokens [count], seeded."""

    def build(count: int, *, vocabulary: int = 96, seed: int = 0) -> torch.Tensor:
        return torch.randint(vocabulary, (count,), generator=torch.Generator().manual_seed(seed))

    return build


@pytest.fixture(scope="session")
def tiny_llama() -> Path:
    """The folder of the model that the repository ships."""
    return Path(__file__).parents[2] / "examples" / "models" / "tiny-llama"


@pytest.fixture
def cli(tmp_path, monkeypatch, capsys):
    """The command line in this process, with a database of the test's own."""
    monkeypatch.setenv("FLEXQ_BENCH_DB", str(tmp_path / "flexq.sqlite"))

    def run(*arguments: str) -> SimpleNamespace:
        capsys.readouterr()
        code = main(arguments)
        captured = capsys.readouterr()
        return SimpleNamespace(code=code, out=captured.out, err=captured.err, error=captured.err)

    return run
