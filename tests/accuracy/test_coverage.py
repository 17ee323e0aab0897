"""Tokens that each expert of a mixture computes."""

from __future__ import annotations

import copy

import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from flexq_bench.accuracy.bos import TextTokens
from flexq_bench.accuracy.coverage import count_expert_tokens, text_coverage
from flexq_bench.schemes.linear_layers import with_linear_layers

CONFIG = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_experts": 8,
    "num_experts_per_tok": 2,
}


@torch.no_grad()
def test_each_token_counts_once_for_each_chosen_expert():
    torch.manual_seed(0)
    model = with_linear_layers(Qwen3MoeForCausalLM(Qwen3MoeConfig(**CONFIG)).eval())
    counts = count_expert_tokens(model)

    model(input_ids=torch.randint(64, (2, 24)))
    copy.deepcopy(model)(input_ids=torch.randint(64, (2, 24)))

    assert [tokens.size for tokens in counts.values()] == [8, 8]
    assert [int(tokens.sum()) for tokens in counts.values()] == [2 * 48, 2 * 48]


def test_dense_model_has_no_experts(a_model):
    assert count_expert_tokens(a_model()) == {}


def test_coverage_is_of_the_evaluated_segments():
    tokens = TextTokens(torch.arange(40) % 16, None)
    found = text_coverage("made", tokens, 8, 1)

    assert (found.tokens, found.of_tokens) == (8, 40)
    assert (found.segments, found.of_segments) == (1, 5)
    assert (found.vocabulary, found.of_vocabulary) == (8, 16)
