"""Damages of a model for `corruptions.py`, by class.

A damage changes a model of transformers in place, or a copy of its folder. Classes: `numeric`,
`structural`, `positional`, `rare input` (tokens that a text has seldom or late), `path` (kernels
and cache), `artefact` (files of the folder other than weights).
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from corruption_table import NOTHING_DONE

from flexq_bench.accuracy.results import KERNELS, REFERENCE, Through
from flexq_bench.kernels.contract import LinearKernel
from flexq_bench.kernels.formats import NumberFormat, quantize

# Of a model of transformers, in place; `reads_text`: also of the ids of the whole text, [tokens].
Damage = Callable[..., None]
LATE = 2600  # tokens: where a token first occurs for it to be late


def layer(model: Any, kind: str, block: int = 1) -> Any:
    """A linear layer, quantized or not, of a kind, in the second block (or the only one)."""
    names = [n for n, _ in model.named_modules() if n.endswith(f".{kind}")]
    return model.get_submodule(names[min(block, len(names) - 1)])


def linears(model: Any) -> Iterator[Any]:
    """Every linear layer of the blocks."""
    for name, module in model.named_modules():
        if name.endswith("_proj") and isinstance(getattr(module, "weight", None), torch.Tensor):
            yield module


def flip_sign(model: Any, _: float) -> None:
    layer(model, "down_proj").weight.neg_()


def zero_head(model: Any, heads: float) -> None:
    width = model.config.hidden_size // model.config.num_attention_heads
    layer(model, "o_proj").weight[:, : int(heads) * width] = 0


def swap_rows(model: Any, pairs: float) -> None:
    weight = layer(model, "up_proj").weight
    count = int(pairs)
    kept = weight[:count].clone()
    weight[:count] = weight[count : 2 * count]
    weight[count : 2 * count] = kept


def scale_group(model: Any, factor: float) -> None:
    layer(model, "down_proj").weight[0, :128] *= factor


def add_noise(model: Any, share: float) -> None:
    generator = torch.Generator().manual_seed(0)
    for module in linears(model):
        weight = module.weight
        noise = torch.randn(weight.shape, generator=generator).to(weight)
        weight += share * weight.float().std().to(weight.dtype) * noise


def change_rotary_base(model: Any, factor: float) -> None:
    rotary = model.get_submodule(f"{model.base_model_prefix}.rotary_emb")
    base = model.config.rope_parameters["rope_theta"]
    exponent = torch.log(torch.tensor(base * factor)) / torch.log(torch.tensor(float(base)))
    rotary.inv_freq.copy_(rotary.inv_freq ** exponent.to(rotary.inv_freq))


def round_layer(model: Any, bits: float) -> None:
    weight = layer(model, "down_proj").weight
    rounded = quantize(weight.float(), NumberFormat(int(bits), 128)).dequantize(torch.float32)
    weight.copy_(rounded.to(weight))


def put_outlier(model: Any, factor: float) -> None:
    weight = layer(model, "gate_proj").weight
    weight[0, 0] = factor * weight.abs().max()


def change_epsilon(model: Any, factor: float) -> None:
    for module in model.modules():
        if hasattr(module, "variance_epsilon"):
            module.variance_epsilon *= factor


def scale_keys(model: Any, factor: float) -> None:
    """A cache whose scales of keys are off returns keys that are: as if k_proj had made them."""
    for name, module in model.named_modules():
        if name.endswith(".k_proj"):
            module.register_forward_hook(lambda _, __, y: y * factor)


class TailCut:
    """A kernel that leaves the last rows of a launch at zero."""

    def __init__(self, kernel: LinearKernel, rows: int) -> None:
        self._kernel, self._rows = kernel, rows

    def __getattr__(self, name: str) -> Any:
        return getattr(self._kernel, name)

    def gemm(
        self, activation: Any, weight: Any, out: torch.Tensor, *arguments: Any, **named: Any
    ) -> None:
        self._kernel.gemm(activation, weight, out, *arguments, **named)
        out[-self._rows :] = 0


def spoil_tail(model: Any, rows: float) -> None:
    """Leave the last rows of a launch at zero, in the second block's down_proj."""
    decoder = model.forward.decoder  # through kernels decode's forward pass computes all
    blocks = list(decoder.model.blocks)
    index = min(1, len(blocks) - 1)
    down = blocks[index].down
    cut = dataclasses.replace(down, kernel=TailCut(down.kernel, int(rows)))
    blocks[index] = dataclasses.replace(blocks[index], down=cut)
    decoder.model = dataclasses.replace(decoder.model, blocks=tuple(blocks))


def model_hook(model: Any, change: Callable[[Any, Any], Any]) -> None:
    """Change the logits of a model: `change(ids, logits)`."""
    seen: dict[str, Any] = {}

    def before(_: Any, __: Any, named: dict[str, Any]) -> None:
        seen["ids"] = named["input_ids"]

    model.register_forward_pre_hook(before, with_kwargs=True)
    head = model.get_output_embeddings()
    head.register_forward_hook(lambda _, __, logits: change(seen["ids"], logits))


def blocks_of(model: Any) -> Any:
    return model.get_submodule(model.base_model_prefix).layers


def on_block(model: Any, change: Callable[[torch.Tensor], torch.Tensor], block: int = 1) -> None:
    """Change the hidden states [segments, tokens, hidden] that a block returns."""

    def after(_: Any, __: Any, result: Any) -> Any:
        if isinstance(result, tuple):
            return (change(result[0]), *result[1:])
        return change(result)

    blocks = blocks_of(model)
    blocks[min(block, len(blocks) - 1)].register_forward_hook(after)


def scale_k_proj(model: Any, factor: float) -> None:
    layer(model, "k_proj", 2).weight.mul_(factor)


def scale_softmax(model: Any, factor: float) -> None:
    for module in model.modules():
        if hasattr(module, "scaling"):
            module.scaling *= factor


def scale_final_norm(model: Any, factor: float) -> None:
    model.get_submodule(model.base_model_prefix).norm.weight.mul_(factor)


def reward_repetition(model: Any, bonus: float) -> None:
    def change(ids: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        repeated = torch.zeros_like(logits)
        for place in range(logits.shape[1]):
            rows = repeated[:, place]
            rows.scatter_(1, ids[:, : place + 1], bonus)
        return logits + repeated

    model_hook(model, change)


def sharpen(model: Any, factor: float) -> None:
    model.get_output_embeddings().register_forward_hook(lambda _, __, y: y * factor)


def clamp_mlp(model: Any, limit: float) -> None:
    """Saturate the inputs of down_proj at a number of their standard deviations."""
    for name, module in model.named_modules():
        if name.endswith(".down_proj"):
            module.register_forward_pre_hook(
                lambda _, x: x[0].clamp(-limit * x[0].std(), limit * x[0].std())
            )


def use_gelu(model: Any, blocks: float) -> None:
    for block in list(blocks_of(model))[: int(blocks)]:
        block.mlp.act_fn = torch.nn.GELU()


def exchange_blocks(model: Any, _: float) -> None:
    blocks = blocks_of(model)
    blocks[1], blocks[2] = blocks[2], blocks[1]


def duplicate_block(model: Any, _: float) -> None:
    blocks = blocks_of(model)
    blocks[2] = blocks[1]


def exchange_layers(model: Any, _: float) -> None:
    first, second = layer(model, "down_proj", 1), layer(model, "down_proj", 2)
    kept = first.weight.clone()
    first.weight.copy_(second.weight)
    second.weight.copy_(kept)


def exchange_gate_and_up(model: Any, _: float) -> None:
    gate, up = layer(model, "gate_proj"), layer(model, "up_proj")
    kept = gate.weight.clone()
    gate.weight.copy_(up.weight)
    up.weight.copy_(kept)


def exchange_kv_heads(model: Any, _: float) -> None:
    width = model.config.head_dim
    for kind in ("k_proj", "v_proj"):
        weight = layer(model, kind).weight
        kept = weight[:width].clone()
        weight[:width] = weight[width : 2 * width]
        weight[width : 2 * width] = kept


def shrink_residual(model: Any, factor: float) -> None:
    on_block(model, lambda hidden: hidden * factor)


def swap_and_scale(model: Any, factor: float) -> None:
    """Two rows exchanged and six scaled."""
    weight = layer(model, "up_proj").weight
    weight[[6, 7]] = weight[[7, 6]].clone()
    weight[:6] *= factor


def skip_projection(model: Any, rows: float) -> None:
    layer(model, "o_proj").weight[: int(rows)] = 0


def noise_from(model: Any, share: float) -> None:
    """Add noise of a share of the standard deviation from position 128 on."""

    def change(hidden: torch.Tensor) -> torch.Tensor:
        noise = torch.randn(hidden.shape, generator=torch.Generator().manual_seed(1)).to(hidden)
        noise[:, :128] = 0
        return hidden + share * hidden.std() * noise

    on_block(model, change)


def shift_positions(model: Any, first: float) -> None:
    """Positions from `first` on are one too large."""

    def before(_: Any, arguments: Any, named: dict[str, Any]) -> Any:
        ids = named["input_ids"]
        places = torch.arange(ids.shape[1], device=ids.device)
        places = places + (places >= int(first))
        return arguments, {**named, "position_ids": places[None].expand(ids.shape)}

    model.register_forward_pre_hook(before, with_kwargs=True)


def stretch_rotary(model: Any, factor: float) -> None:
    """Linear scaling of positions."""
    model.get_submodule(f"{model.base_model_prefix}.rotary_emb").inv_freq.div_(factor)


def forget_beyond(query: torch.Tensor, key: torch.Tensor, window: int) -> torch.Tensor:
    """Attention to the last `window` tokens only."""
    return (key <= query) & (query - key < window)


def damage_last(model: Any, factor: float) -> None:
    """Scale the hidden states of the last 16 positions of each segment."""

    def change(hidden: torch.Tensor) -> torch.Tensor:
        hidden = hidden.clone()
        hidden[:, -17:] *= factor
        return hidden

    on_block(model, change)


def late_tokens(ids: torch.Tensor) -> torch.Tensor:
    """Tokens that first occur past position LATE of a text."""
    early = set(ids[:LATE].tolist())
    return torch.tensor(sorted(set(ids.tolist()) - early), dtype=torch.int64)


def damage_late_mlp(model: Any, share: float, ids: torch.Tensor) -> None:
    """Scale MLP outputs at and after late tokens of a segment by 1 - share."""
    late = late_tokens(ids)
    seen: dict[str, torch.Tensor] = {}

    def before(_: Any, __: Any, named: dict[str, Any]) -> None:
        first = torch.isin(named["input_ids"], late.to(named["input_ids"].device))
        seen["after"] = first.cumsum(1) > 0

    model.register_forward_pre_hook(before, with_kwargs=True)
    for block in blocks_of(model):
        block.mlp.register_forward_hook(
            lambda _, __, y: torch.where(seen["after"][..., None], (1 - share) * y, y)
        )


def exchange_late_embeddings(model: Any, share: float, ids: torch.Tensor) -> None:
    """Input embeddings of a share of the late tokens become those of other tokens."""
    late = late_tokens(ids)
    late = late[: max(2, int(share * len(late)))]
    words = model.get_input_embeddings()
    head = model.get_output_embeddings()
    if head.weight is words.weight:  # the head stays as it is
        head.weight = torch.nn.Parameter(words.weight.clone(), requires_grad=False)
    words.weight[late] = words.weight[late.roll(1)].clone()


def scale_late_head(model: Any, factor: float, ids: torch.Tensor) -> None:
    late = late_tokens(ids)

    def change(_: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        logits = logits.clone()
        logits[..., late.to(logits.device)] *= factor
        return logits

    model_hook(model, change)


def lose_embeddings(model: Any, count: float, ids: torch.Tensor) -> None:
    """Zero the embeddings of the rarest tokens of the text."""
    words, times = torch.unique(ids, return_counts=True)
    rare = words[times.argsort()[: int(count)]]
    embeddings = model.get_input_embeddings()
    head = model.get_output_embeddings()
    if head.weight is embeddings.weight:
        head.weight = torch.nn.Parameter(embeddings.weight.clone(), requires_grad=False)
    embeddings.weight[rare] = 0


def read_stale_tokens(model: Any, every: float) -> None:
    """One input token of `every` is the one before."""
    count = {"tokens": 0}

    def before(_: Any, arguments: Any, named: dict[str, Any]) -> Any:
        ids = named["input_ids"].clone()
        flat = ids.view(-1)
        places = torch.arange(1, flat.numel(), device=ids.device)
        places = places[(places + count["tokens"]) % int(every) == 0]
        count["tokens"] += flat.numel()
        flat[places] = flat[places - 1].clone()
        return arguments, {**named, "input_ids": ids}

    model.register_forward_pre_hook(before, with_kwargs=True)


Change = Callable[[torch.Tensor, float], torch.Tensor]


def on_weight(kind: str, change: Change, block: int = 1) -> Damage:
    """A damage of one layer's weight [N, K]. change(weight, size): the new one, of its shape."""

    def apply(model: Any, size: float) -> None:
        weight = layer(model, kind, block).weight
        weight.copy_(change(weight.clone(), size))

    return apply


def on_embeddings(change: Change) -> Damage:
    """A damage of the embeddings, and of a tied head."""

    def apply(model: Any, size: float) -> None:
        weight = model.get_input_embeddings().weight
        weight.copy_(change(weight.clone(), size))

    return apply


def negate_rows(weight: torch.Tensor, rows: float) -> torch.Tensor:
    weight[7 : 7 + int(rows)] *= -1
    return weight


def negate_columns(weight: torch.Tensor, columns: float) -> torch.Tensor:
    weight[:, 7 : 7 + int(columns)] *= -1
    return weight


def reverse_rows(weight: torch.Tensor, rows: float) -> torch.Tensor:
    """The first rows in the other order: those of one head, if there are so many."""
    weight[: int(rows)] = weight[: int(rows)].flip(0)
    return weight


def roll_rows(weight: torch.Tensor, rows: float) -> torch.Tensor:
    return weight.roll(int(rows), 0)


def roll_columns(weight: torch.Tensor, columns: float) -> torch.Tensor:
    return weight.roll(int(columns), 1)


def interleave_rows(weight: torch.Tensor, width: float) -> torch.Tensor:
    """Heads of `width` rows in another program's order of rotary pairs."""
    halves = weight.view(-1, 2, int(width) // 2, weight.shape[1])
    return halves.transpose(1, 2).reshape(weight.shape)


def lower_rank(weight: torch.Tensor, share: float) -> torch.Tensor:
    left, values, right = torch.linalg.svd(weight.float(), full_matrices=False)
    values[int(share * values.numel()) :] = 0
    reduced: torch.Tensor = left * values @ right
    return reduced.to(weight)


def prune(weight: torch.Tensor, share: float) -> torch.Tensor:
    """Zero the smallest weights."""
    least = weight.float().abs().flatten().kthvalue(int(share * weight.numel())).values
    return weight.masked_fill(weight.float().abs() < least, 0)


def lose_weights(weight: torch.Tensor, share: float) -> torch.Tensor:
    """Zero some, as codes that were lost."""
    generator = torch.Generator().manual_seed(0)
    lost = torch.rand(weight.shape, generator=generator) < share
    return weight.masked_fill(lost.to(weight.device), 0)


def clip_weights(weight: torch.Tensor, deviations: float) -> torch.Tensor:
    most = deviations * float(weight.float().std())
    return weight.clamp(-most, most)


def scale_weight(weight: torch.Tensor, factor: float) -> torch.Tensor:
    weight[3, 5] *= factor
    return weight


def shift_weights(weight: torch.Tensor, deviations: float) -> torch.Tensor:
    """All weights a little too large, as codes that are read with a wrong zero point."""
    return weight + deviations * float(weight.float().std())


def exchange_rows(weight: torch.Tensor, row: float) -> torch.Tensor:
    """Exchange a row and the next."""
    first = int(row)
    weight[[first, first + 1]] = weight[[first + 1, first]]
    return weight


def perturb(weight: torch.Tensor, share: float) -> torch.Tensor:
    """Noise, relative to each weight."""
    noise = torch.randn(weight.shape, generator=torch.Generator().manual_seed(0))
    return weight * (1 + share * noise.to(weight))


def scale_norm_channel(model: Any, factor: float) -> None:
    blocks_of(model)[1].post_attention_layernorm.weight[5] *= factor


def exchange_norms(model: Any, _: float) -> None:
    block = blocks_of(model)[1]
    first, second = block.input_layernorm.weight, block.post_attention_layernorm.weight
    kept = first.clone()
    first.copy_(second)
    second.copy_(kept)


def repeat_up(model: Any, _: float) -> None:
    """Both halves of a gated feed-forward have the weights of one."""
    layer(model, "gate_proj", 2).weight.copy_(layer(model, "up_proj", 2).weight)


def keep_largest(model: Any, count: float) -> None:
    """Attend to the `count` tokens of the largest scores alone, in every layer."""
    model.set_attn_implementation("eager")
    softmax = torch.nn.functional.softmax

    def sparse(scores: torch.Tensor, **named: Any) -> torch.Tensor:
        if scores.ndim == 4 and scores.shape[-1] > count:
            least = scores.topk(int(count), dim=-1).values[..., -1:]
            scores = scores.masked_fill(scores < least, torch.finfo(scores.dtype).min)
        return softmax(scores, **named)

    for block in blocks_of(model):
        plain = block.self_attn.forward
        patch = mock.patch.object(torch.nn.functional, "softmax", sparse)
        block.self_attn.forward = patch(plain)


def masked(rule: Callable[..., torch.Tensor]) -> Damage:
    """A damage of the attention's mask. rule(query, key, size): which keys are seen, of places."""

    def apply(model: Any, size: float) -> None:
        def before(_: Any, arguments: Any, named: dict[str, Any]) -> Any:
            ids = named["input_ids"]
            places = torch.arange(ids.shape[1], device=ids.device)
            seen = rule(places[:, None], places[None, :], int(size))
            mask = torch.zeros(seen.shape, dtype=model.dtype, device=ids.device)
            mask.masked_fill_(~seen, torch.finfo(model.dtype).min)
            mask = mask[None, None].expand(ids.shape[0], 1, *seen.shape)
            return arguments, {**named, "attention_mask": mask}

        model.register_forward_pre_hook(before, with_kwargs=True)

    return apply


def see_next(query: torch.Tensor, key: torch.Tensor, every: int) -> torch.Tensor:
    """One position of `every` sees the token that follows."""
    return (key <= query) | ((key == query + 1) & (query % every == every - 1))


def lose_sink(query: torch.Tensor, key: torch.Tensor, window: int) -> torch.Tensor:
    """Positions from `window` on don't see the first four tokens."""
    return (key <= query) & ((key >= 4) | (query < window))


def lose_pages(query: torch.Tensor, key: torch.Tensor, page: int) -> torch.Tensor:
    """The last token of each page but the newest is not seen."""
    return (key <= query) & ((key % page != page - 1) | (query - key < page))


def stop_pair(model: Any, pair: float) -> None:
    """A pair of channels of all heads is not rotated."""
    model.get_submodule(f"{model.base_model_prefix}.rotary_emb").inv_freq[int(pair)] = 0


def regroup_heads(model: Any, block: float) -> None:
    """Query heads take turns on the heads of keys and values, in place of neighbours."""
    heads = model.config.num_attention_heads
    order = torch.arange(heads).view(model.config.num_key_value_heads, -1).T.flatten()
    width = model.config.hidden_size // heads
    weight = layer(model, "q_proj", int(block)).weight
    weight.copy_(weight.view(heads, width, -1)[order].reshape(weight.shape))


def transpose_layer(weight: torch.Tensor, _: float) -> torch.Tensor:
    """A square matrix in the other memory order."""
    return weight.T.contiguous() if weight.shape[0] == weight.shape[1] else weight.flip(0)


def alter_inputs(change: Callable[[torch.Tensor, float], torch.Tensor]) -> Damage:
    """A damage of token ids [segments, tokens]."""

    def apply(model: Any, size: float) -> None:
        def before(_: Any, arguments: Any, named: dict[str, Any]) -> Any:
            return arguments, {**named, "input_ids": change(named["input_ids"].clone(), size)}

        model.register_forward_pre_hook(before, with_kwargs=True)

    return apply


def wrap_ids(ids: torch.Tensor, most: float) -> torch.Tensor:
    """Ids from `most` on lose their highest bit."""
    return torch.where(ids >= int(most), ids & 0xFF, ids)


def merge_repeats(ids: torch.Tensor, run: float) -> torch.Tensor:
    """The last of so many equal tokens is read as another."""
    equal = torch.ones_like(ids, dtype=torch.bool)
    for back in range(1, int(run)):
        equal[:, back:] &= ids[:, back:] == ids[:, :-back]
        equal[:, :back] = False
    return torch.where(equal, (ids + 1) % 256, ids)


def lower_best(model: Any, nats: float) -> None:
    """The likeliest token of each position loses."""

    def change(_: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        best = logits.argmax(-1, keepdim=True)
        return logits.scatter_add(-1, best, torch.full_like(best, -nats, dtype=logits.dtype))

    model_hook(model, change)


def noise_in_batch(model: Any, share: float) -> None:
    """Noise in every sequence of a batch but the first."""

    def change(hidden: torch.Tensor) -> torch.Tensor:
        noise = torch.randn(hidden.shape, generator=torch.Generator().manual_seed(2)).to(hidden)
        noise[:1] = 0
        return hidden + share * hidden.std() * noise

    on_block(model, change)


def add_file(name: str, content: str) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(content)

    return apply


def edited(file: str, change: Callable[[dict[str, Any]], None]) -> Callable[[Path], None]:
    """A damage of a folder: a change of the object in a JSON file."""

    def apply(folder: Path) -> None:
        path = folder / file
        content = json.loads(path.read_text()) if path.is_file() else {}
        change(content)
        path.write_text(json.dumps(content))

    return apply


def set_rotary(config: dict[str, Any]) -> None:
    rope = config.get("rope_parameters") or {"rope_theta": config.get("rope_theta", 10000.0)}
    config["rope_parameters"] = {**rope, "rope_type": "dynamic", "factor": 8.0}


def more_positions(config: dict[str, Any]) -> None:
    config["max_position_embeddings"] *= 128


def reverse_merges(content: dict[str, Any]) -> None:
    merges = content["model"]["merges"]
    merges[-12:] = merges[-12:][::-1]


def config(**values: Any) -> Callable[[Path], None]:
    return edited("config.json", lambda content: content.update(values))


def generation(**values: Any) -> Callable[[Path], None]:
    return edited("generation_config.json", lambda content: content.update(values))


def tokenizer(**values: Any) -> Callable[[Path], None]:
    return edited("tokenizer.json", lambda content: content.update(values))


def clean_up(content: dict[str, Any]) -> None:
    key = "clean_up_tokenization_spaces"
    content |= {key: True, f"{key}_for_bpe_even_though_it_will_corrupt_output": True}


def exchange_ids(content: dict[str, Any]) -> None:
    vocabulary = content["model"]["vocab"]
    first, second = list(vocabulary)[300:302]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]


def reverse_template(folder: Path) -> None:
    """Write a chat template that reverses each message; the original has another one or none."""
    template = "{% for m in messages %}{{ m['content'][::-1] }}{% endfor %}"
    (folder / "chat_template.jinja").write_text(template)


@dataclasses.dataclass(frozen=True)
class Corruption:
    """damage at each of the sizes. kind: its class. reads_text: see Damage. folder: of a copy of
    the model's folder, in place of a damage of the model.
    """

    name: str
    unit: str
    damage: Damage
    sizes: tuple[float, ...]
    through: Through = REFERENCE
    suffix: str = ""  # of the scheme
    kind: str = "numeric"
    reads_text: bool = False
    folder: Callable[[Path], None] | None = None

    def apply(self, model: Any, size: float, ids: torch.Tensor) -> None:
        """Damage a model. ids: of the text."""
        arguments = (model, size, ids) if self.reads_text else (model, size)
        self.damage(*arguments)


def unchanged(model: Any, size: float) -> None:
    """No damage."""


def of_folder(name: str, change: Callable[[Path], None]) -> Corruption:
    return Corruption(name, "", unchanged, (1,), kind="artefact", folder=change)


WALL = (
    Corruption("sign", "layers", flip_sign, (1,), kind="structural"),
    Corruption("head", "heads zeroed", zero_head, (1,), kind="structural"),
    Corruption("rows", "pairs swapped", swap_rows, (1, 8), kind="structural"),
    Corruption("scale", "× one group", scale_group, (1.1, 2.0, 8.0)),
    Corruption("noise", "of σ, all weights", add_noise, (0.003, 0.01, 0.03)),
    Corruption("rotary", "× base", change_rotary_base, (1.02, 1.2, 10.0), kind="positional"),
    Corruption("bits", "bits, one layer", round_layer, (5, 4, 3)),
    Corruption("outlier", "× largest weight", put_outlier, (2.0, 10.0, 100.0)),
    Corruption("epsilon", "× ε of norms", change_epsilon, (10.0, 1000.0)),
    Corruption("cache", "× scale of keys", scale_keys, (1.01, 1.1), suffix="+kv8", kind="path"),
    Corruption("tail", "rows of a launch", spoil_tail, (1, 8), through=KERNELS, kind="path"),
    Corruption("k_proj", "× weights of a layer", scale_k_proj, (1.01, 1.05)),
    Corruption("softmax", "× scale", scale_softmax, (1.02, 1.2)),
    Corruption("final norm", "× weights", scale_final_norm, (1.01, 1.05)),
    Corruption("repetition", "bonus of logits", reward_repetition, (0.1, 0.3)),
    Corruption("temperature", "× logits", sharpen, (1.01, 1.1)),
    Corruption("saturation", "σ of MLPs", clamp_mlp, (4.0, 8.0)),
    Corruption("activation", "blocks with GELU", use_gelu, (1,)),
    Corruption("blocks", "exchanged", exchange_blocks, (1,), kind="structural"),
    Corruption("duplicate", "blocks", duplicate_block, (1,), kind="structural"),
    Corruption("layers", "exchanged", exchange_layers, (1,), kind="structural"),
    Corruption("gate and up", "exchanged", exchange_gate_and_up, (1,), kind="structural"),
    Corruption("kv heads", "exchanged", exchange_kv_heads, (1,), kind="structural"),
    Corruption("residual", "× hidden states", shrink_residual, (0.95, 0.99), kind="structural"),
    Corruption("rows and scales", "× six rows", swap_and_scale, (1.5,), kind="structural"),
    Corruption("output rows", "zeroed", skip_projection, (1, 8), kind="structural"),
    Corruption("noise from 128", "of σ", noise_from, (0.02, 0.2), kind="positional"),
    Corruption("positions", "first that is off", shift_positions, (128, 200), kind="positional"),
    Corruption("stretch", "× positions", stretch_rotary, (1.02, 1.2), kind="positional"),
    Corruption("window", "tokens", masked(forget_beyond), (64, 192), kind="positional"),
    Corruption("last tokens", "× hidden states", damage_last, (0.5, 0.9), kind="positional"),
    Corruption(
        "late MLPs", "of outputs", damage_late_mlp, (0.5, 1.0), kind="rare input", reads_text=True
    ),
    Corruption(
        "late embeddings",
        "of them",
        exchange_late_embeddings,
        (0.5, 1.0),
        kind="rare input",
        reads_text=True,
    ),
    Corruption(
        "late head", "× logits", scale_late_head, (0.9, 0.5), kind="rare input", reads_text=True
    ),
    Corruption(
        "lost embeddings", "tokens", lose_embeddings, (1, 16), kind="rare input", reads_text=True
    ),
    Corruption("stale tokens", "1 in", read_stale_tokens, (1000, 100), kind="rare input"),
    Corruption("row sign", "rows", on_weight("v_proj", negate_rows), (1, 4), kind="structural"),
    Corruption("column sign", "columns", on_weight("down_proj", negate_columns), (1, 4)),
    Corruption("order in a head", "rows", on_weight("q_proj", reverse_rows), (32,)),
    Corruption("rolled rows", "rows", on_weight("gate_proj", roll_rows), (1,), kind="structural"),
    Corruption("rolled columns", "columns", on_weight("k_proj", roll_columns), (1, 2)),
    Corruption("heads of o", "columns", on_weight("o_proj", roll_columns), (32, 64)),
    Corruption("rotary pairs", "rows", on_weight("q_proj", interleave_rows), (32,)),
    Corruption("low rank", "of the ranks", on_weight("up_proj", lower_rank), (0.75, 0.95)),
    Corruption("pruned", "of a layer", on_weight("up_proj", prune, 2), (0.1, 0.3)),
    Corruption("lost codes", "of a layer", on_weight("up_proj", lose_weights), (0.002, 0.02)),
    Corruption("clipped", "σ", on_weight("down_proj", clip_weights, 0), (2.0, 3.0)),
    Corruption("one weight", "×", on_weight("down_proj", scale_weight), (-1.0, 64.0)),
    Corruption("offset", "σ, a layer", on_weight("up_proj", shift_weights), (0.02, 0.1)),
    Corruption("embedding noise", "relative", on_embeddings(perturb), (0.02, 0.05)),
    Corruption("embeddings", "exchanged with the next", on_embeddings(exchange_rows), (40, 300)),
    Corruption("norm channel", "×", scale_norm_channel, (0.0, 1.03)),
    Corruption("norms", "exchanged", exchange_norms, (1,), kind="structural"),
    Corruption("gate as up", "layers", repeat_up, (1,), kind="structural"),
    Corruption("sparse attention", "tokens", keep_largest, (16, 48)),
    Corruption("likeliest", "nats lower", lower_best, (0.1,)),
    Corruption("next token", "1 in", masked(see_next), (128, 16), kind="positional"),
    Corruption("sink", "first without", masked(lose_sink), (192, 64), kind="positional"),
    Corruption("pages", "tokens", masked(lose_pages), (64, 16), kind="path"),
    Corruption("rotary pair", "", stop_pair, (15, 2), kind="positional"),
    Corruption("head groups", "block", regroup_heads, (0,), kind="structural"),
    Corruption("transposed", "", on_weight("q_proj", transpose_layer), (1,), kind="structural"),
    Corruption("wrapped ids", "from", alter_inputs(wrap_ids), (505, 400), kind="rare input"),
    Corruption("repeats", "tokens", alter_inputs(merge_repeats), (4, 2), kind="rare input"),
    Corruption("batch", "of σ", noise_in_batch, (0.02, 0.1), kind="path"),
    of_folder("nested program", add_file("custom_generate/generate.py", "def generate(): 1\n")),
    of_folder("other layout", add_file("params.json", "{}")),
    of_folder("forced cleanup", edited("tokenizer_config.json", clean_up)),
    of_folder("least new tokens", generation(min_new_tokens=500)),
    of_folder("long text penalty", generation(exponential_decay_length_penalty=[5, 1.5])),
    of_folder("eos id", edited("config.json", lambda c: c.update(eos_token_id=5))),
    of_folder(
        "generation eos", edited("generation_config.json", lambda c: c.update(eos_token_id=7))
    ),
    of_folder(
        "temperature 9", edited("generation_config.json", lambda c: c.update(temperature=9.0))
    ),
    of_folder("chat template", reverse_template),
    of_folder("detokenizer", edited("tokenizer.json", lambda c: c.update(decoder=None))),
    of_folder("merges", edited("tokenizer.json", reverse_merges)),
    of_folder("dynamic rope", edited("config.json", set_rotary)),
    of_folder("more positions", edited("config.json", more_positions)),
    of_folder("rope theta", config(rope_parameters={"rope_type": "default", "rope_theta": 2e4})),
    of_folder("norm epsilon", config(rms_norm_eps=1e-5)),
    of_folder("sliding window", config(sliding_window=64)),
    of_folder("half rotary", config(partial_rotary_factor=0.5)),
    of_folder("activation function", config(hidden_act="gelu")),
    of_folder("repetition penalty", generation(repetition_penalty=1.3)),
    of_folder("suppressed token", generation(suppress_tokens=[5])),
    of_folder("forced end", generation(forced_eos_token_id=0)),
    of_folder("top p", generation(do_sample=True, top_p=0.1)),
    of_folder("stop string", generation(stop_strings=["the"])),
    of_folder("few new tokens", generation(max_new_tokens=5)),
    of_folder("ids", edited("tokenizer.json", exchange_ids)),
    of_folder("compatibility form", tokenizer(normalizer={"type": "NFKC"})),
    of_folder(
        "dropout of merges", edited("tokenizer.json", lambda c: c["model"].update(dropout=0.02))
    ),
    of_folder("bos id", edited("config.json", lambda c: c.update(bos_token_id=5))),
    of_folder(
        "normalizer", edited("tokenizer.json", lambda c: c.update(normalizer={"type": "Lowercase"}))
    ),
)
NOTHING = Corruption(NOTHING_DONE, "", unchanged, (0,))
