"""Keys and values of an evaluated model are those of decode's cache."""

from __future__ import annotations

import pytest
import torch

from flexq_bench.accuracy.perplexity import perplexity
from flexq_bench.decode.quantized_cache import QuantizedCache, quantize_cache
from flexq_bench.errors import UsageError
from flexq_bench.kernels.decoder.kv import empty_layer


@pytest.mark.parametrize("bits", [8, 4])
def test_cache_equals_that_of_decode_bit_for_bit(a_model, bits):
    batch, heads, tokens, head_dim = 2, 2, 9, 8
    generator = torch.Generator().manual_seed(0)
    keys, values = (
        torch.randn(batch, heads, tokens, head_dim, generator=generator).half() for _ in range(2)
    )
    cache = QuantizedCache(a_model().config, bits)
    cache.update(keys[:, :, :5], values[:, :, :5], 0)
    cached = torch.stack(cache.update(keys[:, :, 5:], values[:, :, 5:], 0))

    layer = empty_layer(batch, heads, tokens, head_dim, bits, torch.device("cpu"))
    slots, positions = torch.arange(batch), torch.arange(tokens).expand(batch, -1)
    layer.write(keys.transpose(1, 2), values.transpose(1, 2), slots, positions)
    assert torch.equal(cached, layer.read(slots, tokens))


def test_fewer_cache_bits_cost_more_and_sixteen_nothing(a_model, some_tokens):
    tokens = some_tokens(128)

    def nll(bits):
        model = a_model()
        quantize_cache(model, bits)
        return perplexity(model, tokens, context=32).mean_nll

    plain = perplexity(a_model(), tokens, context=32).mean_nll
    assert nll(16) == plain
    assert 0 < abs(nll(8) - plain) < abs(nll(4) - plain)


def test_learned_positions_follow_the_cache_length(an_opt, some_tokens):
    tokens = some_tokens(64)
    plain = perplexity(an_opt, tokens, context=32).mean_nll
    quantize_cache(an_opt, 8)
    rounded = perplexity(an_opt, tokens, context=32).mean_nll
    assert rounded != plain
    assert rounded == pytest.approx(plain, rel=0.02)


def test_generated_tokens_read_the_rounded_cache(a_model, some_tokens):
    """Token by token the model sees what one pass over all tokens sees."""
    model = a_model()
    quantize_cache(model, 4)
    prompt = some_tokens(6)[None]
    generated = model.generate(
        prompt,
        max_new_tokens=8,
        do_sample=False,
        pad_token_id=0,
        eos_token_id=None,
        attention_mask=torch.ones_like(prompt),
    )
    with torch.no_grad():
        logits = model(input_ids=generated, use_cache=False).logits
    assert torch.equal(logits[0, 5:-1].argmax(-1), generated[0, 6:])


def test_another_cache_with_tokens_is_refused(a_model, some_tokens):
    from transformers import DynamicCache

    model = a_model()
    cached = DynamicCache(config=model.config)
    with torch.no_grad():
        model(input_ids=some_tokens(4)[None], past_key_values=cached)
        quantize_cache(model, 8)
        with pytest.raises(UsageError, match="was given another cache"):
            model(input_ids=some_tokens(1)[None], past_key_values=cached)
