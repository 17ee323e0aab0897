"""Make the archives of this folder: a tiny model quantized by other tools, as they store it.

    python make_layouts.py TOOL FOLDER

TOOL is a function below; each runs with the tool of its name installed (the versions are stored in
`expected.json`). An archive contains the tool's folder and `expected.json`: for each quantized
layer the dtype and the SHA-256 of the bytes of the weights [N, K] that the tool dequantizes.

Rows repeat with a period of four and other scales, so that an archive takes a few kB.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import sys
import tarfile
from collections.abc import Callable, Iterable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import nn


def say(*values: object) -> None:
    """Write a line of progress."""
    sys.stdout.write(" ".join(map(str, values)) + "\n")
    sys.stdout.flush()


HIDDEN, INNER, WORDS = 128, 192, 64
Weights = dict[str, torch.Tensor]


def tiny_llama(dtype: torch.dtype = torch.float32, inner: int = INNER, hidden: int = HIDDEN) -> Any:
    """A decoder of one block, with compressible random weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=WORDS, hidden_size=hidden, intermediate_size=inner, num_hidden_layers=1,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64,
        tie_word_embeddings=False, architectures=["LlamaForCausalLM"],
    )  # fmt: skip
    model = LlamaForCausalLM(config).to(dtype).eval()
    with torch.no_grad():
        for seed, (_, parameter) in enumerate(sorted(model.named_parameters())):
            if parameter.ndim == 2:
                parameter.copy_(repeating(*parameter.shape, seed=seed))
    return model


def dense_folder(
    folder: Path, dtype: torch.dtype, inner: int = INNER, hidden: int = HIDDEN
) -> Path:
    """The model and a tokenizer, as transformers stores them."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tiny_llama(dtype, inner, hidden).save_pretrained(folder)
    words = Tokenizer(models.WordLevel({str(i): i for i in range(WORDS)}, unk_token="0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="0").save_pretrained(folder)
    return folder


def repeating(rows: int, columns: int, *, seed: int) -> torch.Tensor:
    """Weights whose rows repeat with a period of four, times one of three powers of two."""
    generator = torch.Generator().manual_seed(seed)
    base = torch.randn(4, columns, generator=generator) * 0.05
    row = torch.arange(rows)
    return base[row % 4] * (2.0 ** ((row // 4) % 3 - 1))[:, None]


def linears(model: nn.Module) -> Iterable[tuple[str, nn.Module]]:
    """The layers of the block, by name."""
    return ((n, m) for n, m in model.named_modules() if ".layers." in n and n.endswith("_proj"))


def text() -> torch.Tensor:
    """Tokens for calibration, [4, 32]."""
    return torch.randint(0, WORDS, (4, 32), generator=torch.Generator().manual_seed(0))


def store(out: Path, name: str, folder: Path, weights: Weights, tools: Iterable[str],
          note: str = "") -> None:  # fmt: skip
    """Write NAME.tar.xz: a tool's folder, and the hashes of its own dequantized weights."""
    expected = {
        "tools": {tool: version(tool) for tool in (*tools, "torch", "transformers")},
        "note": note,
        "weights": {
            layer: {
                "dtype": str(weight.dtype).removeprefix("torch."),
                "shape": list(weight.shape),
                "sha256": digest(weight),
            }
            for layer, weight in sorted(weights.items())
        },
    }
    kept = ("config.json", "hf_quant_config.json", "quanto_qmap.json", "qmodel.pt")
    with tarfile.open(out / f"{name}.tar.xz", "w:xz", preset=9) as archive:
        for path in sorted(folder.iterdir()):
            if path.name in kept or path.suffix in (".safetensors", ".gguf"):
                add(archive, path.name, path.read_bytes())
        add(archive, "expected.json", json.dumps(expected, indent=1).encode())
    say(name, (out / f"{name}.tar.xz").stat().st_size, len(weights))


def add(archive: tarfile.TarFile, name: str, content: bytes) -> None:
    info = tarfile.TarInfo(name)
    info.size = len(content)
    archive.addfile(info, io.BytesIO(content))


def digest(weight: torch.Tensor) -> str:
    """SHA-256 of the bytes of a matrix in row-major order, without negative zeros."""
    plain = (weight.detach() + 0.0).contiguous().cpu()
    return hashlib.sha256(plain.view(torch.uint8).numpy().tobytes()).hexdigest()


def save(model: Any, folder: Path, section: dict[str, Any], tensors: Weights) -> None:
    """Write config.json with a quantization section, and tensors beside the dense ones."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    config = {**model.config.to_dict(), "quantization_config": section}
    (folder / "config.json").write_text(json.dumps(config, indent=1, default=str))
    plain = {n: t for n, t in model.state_dict().items() if ".layers." not in n or "norm" in n}
    save_file(
        {n: t.contiguous() for n, t in {**plain, **tensors}.items()},
        folder / "model.safetensors",
        {"format": "pt"},
    )


def compressed_tensors(out: Path, work: Path) -> None:
    """llm-compressor: presets without calibration data, from its own `oneshot`."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationConfig
    from datasets import Dataset
    from llmcompressor import oneshot
    from llmcompressor.modifiers.quantization import QuantizationModifier
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    rows = text().tolist()
    data = Dataset.from_dict({"input_ids": rows, "attention_mask": [[1] * 32] * 4})
    cache = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False,
             "symmetric": True}  # fmt: skip
    presets = (
        "KV NVFP4 NVFP4A16 MXFP4A16 MXFP6A16 MXFP8A16 FP8_DYNAMIC FP8_BLOCK W8A8 W4A16 W4A16_ASYM"
    )
    for preset in presets.split():
        dense = str(
            dense_folder(
                work / preset / "dense", torch.bfloat16, 256 if preset.startswith("W4") else INNER
            )
        )
        model = AutoModelForCausalLM.from_pretrained(dense, dtype=torch.bfloat16)
        recipe = QuantizationModifier(
            targets="Linear", scheme="FP8_DYNAMIC" if preset == "KV" else preset,
            ignore=["lm_head"], kv_cache_scheme=cache if preset == "KV" else None,
        )  # fmt: skip
        calibrated = {"dataset": data, "num_calibration_samples": 4, "max_seq_length": 32}
        oneshot(model=model, tokenizer=dense, recipe=recipe,
                **(calibrated if preset in ("KV", "NVFP4") else {}))  # fmt: skip
        folder = work / preset
        model.save_pretrained(folder, save_compressed=True)
        stored = load_file(folder / "model.safetensors")
        section = json.loads((folder / "config.json").read_text())["quantization_config"]
        config = QuantizationConfig.model_validate(section)
        (scheme,) = config.config_groups.values()
        compressor = BaseCompressor.get_value_from_registry(scheme.format or config.format)
        weights = {}
        for name, _ in linears(tiny_llama()):
            own = {k.removeprefix(f"{name}."): t for k, t in stored.items() if f"{name}." in k}
            weights[name] = compressor.decompress(own, scheme)["weight"]
        store(out, f"compressed-tensors-{preset.lower().replace('_', '-')}", folder, weights,
              ("compressed-tensors", "llmcompressor"))  # fmt: skip


def torchao(out: Path, work: Path) -> None:
    """torchao through transformers: its safetensors layout."""
    from safetensors.torch import save_file
    from torchao.prototype.mx_formats import MXDynamicActivationMXWeightConfig
    from torchao.prototype.safetensors.safetensors_support import flatten_tensor_state_dict
    from torchao.quantization import (
        Float8DynamicActivationFloat8WeightConfig,
        Float8WeightOnlyConfig,
        Int8DynamicActivationInt8WeightConfig,
        Int8WeightOnlyConfig,
        IntxWeightOnlyConfig,
        PerGroup,
        quantize_,
    )

    configs = {
        "float8-weight-only": Float8WeightOnlyConfig(),
        "int8-weight-only": Int8WeightOnlyConfig(version=2),
        "int8-dynamic": Int8DynamicActivationInt8WeightConfig(version=2),
        "int4-groups": IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=PerGroup(64)),
        "float8-dynamic": Float8DynamicActivationFloat8WeightConfig(),
        "mxfp8": MXDynamicActivationMXWeightConfig(),
    }
    for name, config in configs.items():
        try:
            model = tiny_llama(torch.bfloat16)
            quantize_(model, config, lambda m, n: isinstance(m, nn.Linear) and ".layers." in n)
            from transformers import TorchAoConfig

            section = TorchAoConfig(config).to_dict()
            folder = work / name
            folder.mkdir(parents=True, exist_ok=True)
            described = {**model.config.to_dict(), "quantization_config": section}
            (folder / "config.json").write_text(json.dumps(described, indent=1, default=str))
            tensors, metadata = flatten_tensor_state_dict(model.state_dict())
            save_file({k: t.contiguous() for k, t in tensors.items()},
                      folder / "model.safetensors", metadata)  # fmt: skip
            weights = {n: m.weight.dequantize().detach() for n, m in linears(model)}
            store(out, f"torchao-{name}", folder, weights, ("torchao",))
        except Exception as error:  # of a configuration that needs a GPU
            say(name, type(error).__name__, str(error)[:200])


def bitsandbytes(out: Path, work: Path) -> None:
    """bitsandbytes through transformers: `save_pretrained` of a model loaded in 8 and 4 bits."""
    import bitsandbytes.functional as bnb
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    tiny_llama(torch.bfloat16).save_pretrained(work / "dense")
    configs = {
        "int8": BitsAndBytesConfig(load_in_8bit=True),
        "nf4": BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4",
                                  bnb_4bit_compute_dtype=torch.float32),
        "nf4-double": BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4",
                                         bnb_4bit_use_double_quant=True,
                                         bnb_4bit_compute_dtype=torch.bfloat16),
        "fp4": BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="fp4"),
    }  # fmt: skip
    for name, config in configs.items():
        dtype = torch.float32 if name == "nf4" else torch.bfloat16  # of the dequantized weights
        model = AutoModelForCausalLM.from_pretrained(
            work / "dense", quantization_config=config, device_map="cpu", dtype=dtype
        )
        folder = work / name
        model.save_pretrained(folder)
        weights = {}
        for layer, module in linears(model):
            if name == "int8":
                state = module.weight
                weights[layer] = bnb.int8_vectorwise_dequant(state.data, state.SCB).to(dtype)
            else:
                weights[layer] = bnb.dequantize_4bit(
                    module.weight.data, module.weight.quant_state
                ).detach()
        store(out, f"bitsandbytes-{name}", folder, weights, ("bitsandbytes",))


def auto_round(out: Path, work: Path) -> None:
    """AutoRound without tuning, in each of its export formats."""
    os.environ["TORCHDYNAMO_DISABLE"] = "1"
    dense = dense_folder(work / "dense", torch.float16, 256)
    from auto_round import AutoRound

    runs = {
        "native-w4": ({"scheme": "W4A16"}, "auto_round"),
        "native-w4-asym": ({"scheme": "W4A16", "sym": False}, "auto_round"),
        "native-w3": ({"scheme": "W3A16"}, "auto_round"),
        "native-mxfp4": ({"scheme": "MXFP4"}, "auto_round"),
        "gptq": ({"scheme": "W4A16"}, "auto_gptq"),
        "awq": ({"scheme": "W4A16", "sym": False}, "auto_awq"),
    }
    lines = [{"text": " ".join(map(str, row))} for row in text().tolist()]
    (work / "text.json").write_text(json.dumps(lines))
    for name, (options, form) in runs.items():
        try:
            tuned = AutoRound(str(dense), iters=0, device_map="cpu",
                              enable_torch_compile=False,
                              disable_opt_rtn=True, nsamples=4, seqlen=16, batch_size=1,
                              dataset=str(work / "text.json"), **options)  # fmt: skip
            tuned.quantize_and_save(str(work / name), format=form)
            stored = next(
                p for p in (work / name).rglob("*") if p.suffix in (".safetensors", ".gguf")
            )
            weights = own_weights(stored.parent) if "native" in name else packed_weights(stored)
            store(out, f"autoround-{name}", stored.parent, weights, ("auto-round",))
        except BaseException as error:
            say(name, type(error).__name__, str(error)[:300])


def packed_weights(path: Path) -> Weights:
    """Weights of GPTQ's and AWQ's layouts by AutoRound's modules for them, FP16."""
    from auto_round.export.export_to_awq.utils import dequantize_gemm
    from auto_round_extension.torch.qlinear_torch_zp import QuantLinear
    from safetensors.torch import load_file

    stored, weights = load_file(path), {}
    for name, _ in linears(tiny_llama(inner=256)):
        own = {k.removeprefix(f"{name}."): t for k, t in stored.items() if f"{name}." in k}
        if "g_idx" not in own:
            parts = (own["qweight"], own["qzeros"], own["scales"])
            weights[name] = dequantize_gemm(*parts, 4, 128).T.contiguous()
            continue
        wide, rows = own["g_idx"].numel(), own["scales"].shape[1]
        module = QuantLinear(4, 128, wide, rows, False, g_idx=True)
        module.load_state_dict(own)
        module.post_init()
        weights[name] = module(torch.eye(wide, dtype=torch.float16)).detach().T.contiguous()
    return weights


def gguf(out: Path, work: Path) -> None:
    """GGUF files: K-quants by AutoRound's quantizers, other types with random codes."""
    from auto_round.export.export_to_gguf.packing import ggml_quant
    from gguf import GGMLQuantizationType as Kind
    from gguf import GGUFReader, GGUFWriter
    from gguf.quants import dequantize

    files = {
        "q2-k": Kind.Q2_K, "q3-k": Kind.Q3_K, "q4-k": Kind.Q4_K, "q5-k": Kind.Q5_K,
        "q6-k": Kind.Q6_K, "iq4-nl": Kind.IQ4_NL, "iq4-xs": Kind.IQ4_XS, "mxfp4": Kind.MXFP4,
    }  # fmt: skip
    layers = {
        "blk.0.attn_v": "self_attn.v_proj", "blk.0.attn_output": "self_attn.o_proj",
        "blk.0.ffn_gate": "mlp.gate_proj", "blk.0.ffn_up": "mlp.up_proj",
        "blk.0.ffn_down": "mlp.down_proj",
    }  # fmt: skip
    dense = {
        "token_embd": "model.embed_tokens", "output": "lm_head", "output_norm": "model.norm",
        "blk.0.attn_q": "model.layers.0.self_attn.q_proj", "blk.0.attn_norm":
        "model.layers.0.input_layernorm", "blk.0.attn_k": "model.layers.0.self_attn.k_proj",
        "blk.0.ffn_norm": "model.layers.0.post_attention_layernorm",
    }  # fmt: skip
    state = tiny_llama(torch.float32, 512, 256).state_dict()
    for name, kind in files.items():
        folder = work / name
        folder.mkdir(parents=True)
        writer = GGUFWriter(folder / "model.gguf", "llama")
        for key, value in (
            ("context_length", 64), ("embedding_length", 256), ("block_count", 1),
            ("feed_forward_length", 512), ("head_count", 4), ("head_count_kv", 2),
        ):  # fmt: skip
            getattr(writer, f"add_{key}")(value)
        writer.add_layer_norm_rms_eps(1e-6)
        writer.add_vocab_size(WORDS)
        writer.add_tokenizer_model("llama")
        writer.add_token_list([str(i) for i in range(WORDS)])
        writer.add_token_scores([0.0] * WORDS)
        writer.add_token_types([1] * WORDS)
        for stored, own in dense.items():
            writer.add_tensor(f"{stored}.weight", state[f"{own}.weight"].numpy())
        for stored, own in layers.items():
            weight = state[f"model.layers.0.{own}.weight"]
            if name.endswith("-k"):
                codes = ggml_quant(weight, kind.name.lower(), device="cpu")
            else:
                codes = random_blocks(weight, kind)
            writer.add_tensor(f"{stored}.weight", codes, raw_dtype=kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        tensors = {str(t.name).removesuffix(".weight"): t
                   for t in GGUFReader(folder / "model.gguf").tensors}  # fmt: skip
        weights = {
            f"model.layers.0.{own}": torch.from_numpy(
                dequantize(tensors[stored].data, tensors[stored].tensor_type).copy()
            ).view(state[f"model.layers.0.{own}.weight"].shape)
            for stored, own in layers.items()
        }
        note = "K-quants by AutoRound" if name.endswith("-k") else "random codes"
        store(out, f"gguf-{name}", folder, weights, ("gguf", "auto-round"), note)


def random_blocks(weight: torch.Tensor, kind: Any) -> Any:
    """Random blocks of a GGUF type with finite scales, the same for every fourth row."""
    from gguf.constants import GGML_QUANT_SIZES

    size, stored = GGML_QUANT_SIZES[kind]
    rows, columns = weight.shape
    generator = torch.Generator().manual_seed(columns)
    blocks = torch.randint(0, 256, (4, columns // size, stored), generator=generator).byte()
    if kind.name == "MXFP4":
        blocks[..., 0] = 115 + blocks[..., 0] % 8
    else:  # an FP16 scale of about 2^-9 comes first
        blocks[..., 1] = 0x18
    return blocks.repeat(rows // 4, 1, 1).flatten(1).numpy()


def own_weights(folder: Path) -> Weights:
    """Weights of a folder's layers, as transformers and the tool's modules multiply by them."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, device_map="cpu")
    weights = {}
    for name, module in linears(model):
        wide = HIDDEN if "down" not in name else model.config.intermediate_size
        weights[name] = module(torch.eye(wide, dtype=torch.float16)).detach().T.contiguous()
    return weights


def quanto(out: Path, work: Path) -> None:
    """optimum-quanto's own folder: weights and quanto_qmap.json."""
    from optimum.quanto import QuantizedModelForCausalLM, qfloat8, qint4, qint8

    for name, kind in {"qint8": qint8, "qfloat8": qfloat8, "qint4": qint4}.items():
        model = tiny_llama(torch.float32)
        quantized = QuantizedModelForCausalLM.quantize(model, weights=kind, exclude="lm_head")
        folder = work / name
        quantized.save_pretrained(folder)
        weights = {n: m.weight.dequantize().detach() for n, m in linears(quantized._wrapped)}
        store(out, f"quanto-{name}", folder, weights, ("optimum-quanto",))


def hqq(out: Path, work: Path) -> None:
    """HQQ's own folder: a pickled qmodel.pt."""
    from hqq.core.quantize import BaseQuantizeConfig
    from hqq.models.hf.base import AutoHQQHFModel

    model = tiny_llama(torch.float16)
    AutoHQQHFModel.quantize_model(
        model, quant_config=BaseQuantizeConfig(nbits=4, group_size=64),
        compute_dtype=torch.float16, device="cpu",
    )  # fmt: skip
    folder = work / "hqq"
    AutoHQQHFModel.save_quantized(model, str(folder))
    weights = {n: m.dequantize().detach() for n, m in linears(model)}
    store(out, "hqq-4bit", folder, weights, ("hqq",))


def modelopt(out: Path, work: Path) -> None:
    """NVIDIA's Model Optimizer: `export_hf_checkpoint`."""
    import modelopt.torch.quantization as mtq
    from modelopt.torch.export import export_hf_checkpoint

    configs = {
        "fp8": mtq.FP8_DEFAULT_CFG,
        "fp8-kv": {**mtq.FP8_DEFAULT_CFG, "quant_cfg": [
            *mtq.FP8_DEFAULT_CFG["quant_cfg"], *mtq.FP8_KV_CFG["quant_cfg"]]},
        "nvfp4": mtq.NVFP4_DEFAULT_CFG,
        "w4a8-awq": mtq.W4A8_AWQ_BETA_CFG,
        "w4a16-awq": mtq.INT4_AWQ_CFG,
        "mxfp8": mtq.MXFP8_DEFAULT_CFG,
        "fp8-pc-pt": getattr(mtq, "FP8_PER_CHANNEL_PER_TOKEN_CFG", None),
        "fp8-pb-wo": getattr(mtq, "FP8_2D_BLOCKWISE_WEIGHT_ONLY_CFG", None),
    }  # fmt: skip
    for name, config in configs.items():
        if config is None:
            continue
        try:
            model = tiny_llama(torch.bfloat16, inner=256)
            mtq.quantize(model, config, lambda m: m(text()))
            folder = work / name
            export_hf_checkpoint(model, export_dir=folder)
            awq = "awq" in name
            note = "AWQ's weights are unpacked by this script, in its own words" if awq else ""
            weights = {n: modelopt_weight(folder, n, name) for n, _ in linears(tiny_llama())}
            store(out, f"modelopt-{name}", folder, weights, ("nvidia-modelopt",), note)
        except Exception as error:
            say(name, type(error).__name__, str(error)[:300])


def modelopt_weight(folder: Path, layer: str, name: str) -> torch.Tensor:
    """A stored weight, dequantized by the tool's classes."""
    from modelopt.torch.quantization.qtensor import FP8QTensor
    from safetensors.torch import load_file

    stored = load_file(folder / "model.safetensors")
    codes, scale = stored[f"{layer}.weight"], stored[f"{layer}.weight_scale"]
    if "awq" in name:
        nibbles = torch.stack([codes & 15, codes >> 4], 1).flatten(0, 1).to(torch.int8)
        signed = (nibbles ^ 8) - 8
        wide = scale.double().repeat_interleave(codes.shape[1] // scale.shape[1], 1)
        if "w4a16" in name:
            return (signed * wide).float()
        outer = stored[f"{layer}.weight_scale_2"].double()
        return ((signed * wide / outer).float().to(torch.float8_e4m3fn).double() * outer).float()
    blocks = None
    if name == "fp8-pb-wo":
        blocks = {-1: 128, -2: 128}
        scale = scale.reshape(-(-codes.shape[0] // 128), -1)
    elif scale.ndim:
        scale = scale.reshape(-1, 1)
    tensor = FP8QTensor(codes.shape, torch.float32, codes)
    return tensor.dequantize(torch.float32, scale=scale, block_sizes=blocks)


def modelopt_small(out: Path, work: Path) -> None:
    """NVFP4 and MXFP8 of Model Optimizer, whose quantizers need a GPU: its tensor classes."""
    from modelopt.torch.quantization.qtensor import MXFP8QTensor, NVFP4QTensor

    for name in ("nvfp4", "mxfp8"):
        tensors: Weights = {}
        weights: Weights = {}
        model = tiny_llama(torch.bfloat16)
        for layer, module in linears(model):
            if name == "nvfp4":
                tensor, scale, outer = NVFP4QTensor.quantize(module.weight.detach(), 16)
                weights[layer] = tensor.dequantize(
                    torch.bfloat16, scale=scale, double_scale=outer, block_sizes={-1: 16}
                )
                tensors[f"{layer}.weight_scale_2"] = outer
                tensors[f"{layer}.input_scale"] = torch.tensor(0.003)
            else:
                tensor, scale = MXFP8QTensor.quantize(module.weight.detach())
                weights[layer] = tensor.dequantize(torch.bfloat16, scale=scale)
            tensors |= {f"{layer}.weight": tensor._quantized_data, f"{layer}.weight_scale": scale}
        section = {"quant_method": "modelopt", "quant_algo": name.upper(), "ignore": ["lm_head"]}
        save(model, work / name, section, tensors)
        store(out, f"modelopt-{name}", work / name, weights, ("nvidia-modelopt",),
              "its tensor classes, in the layout of its export")  # fmt: skip


def published(out: Path, work: Path) -> None:
    """Layouts written in this script's words, dequantized by transformers' own functions."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    def blocks_of(weight: torch.Tensor, powers: bool) -> tuple[torch.Tensor, torch.Tensor]:
        rows, columns = weight.shape
        padded = nn.functional.pad(weight, (0, -columns % 128, 0, -rows % 128))
        tiles = padded.view(padded.shape[0] // 128, 128, -1, 128)
        scale = tiles.abs().amax((1, 3)) / 448
        if powers:
            scale = torch.exp2(torch.ceil(torch.log2(scale)))
        wide = scale.repeat_interleave(128, 0).repeat_interleave(128, 1)[:rows, :columns]
        return (weight / wide).to(torch.float8_e4m3fn), scale

    for name, powers in (("fp8-blocks", False), ("fp8-blocks-ue8m0", True)):
        model, tensors, weights = tiny_llama(), {}, {}
        for layer, module in linears(model):
            codes, scale = blocks_of(module.weight.detach(), powers)
            tensors |= {f"{layer}.weight": codes, f"{layer}.weight_scale_inv": scale}
            wide = scale.repeat_interleave(128, 0).repeat_interleave(128, 1)
            weights[layer] = codes.float() * wide[: codes.shape[0], : codes.shape[1]]
        section = {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [128, 128],
            "modules_to_not_convert": ["lm_head"],
        }
        section |= {"scale_fmt": "ue8m0"} if powers else {}
        save(model, work / name, section, tensors)
        store(
            out,
            f"published-{name}",
            work / name,
            weights,
            (),
            "DeepSeek-V3's and Qwen3-FP8's layout (weight_dequant of DeepSeek's kernel.py)",
        )
    model, tensors, weights = tiny_llama(), {}, {}
    for layer, module in linears(model):
        scale = module.weight.detach().abs().amax() / 448
        codes = (module.weight.detach() / scale).to(torch.float8_e4m3fn)
        tensors |= {
            f"{layer}.weight": codes,
            f"{layer}.weight_scale_inv": scale.bfloat16(),
            f"{layer}.activation_scale": torch.tensor(0.01, dtype=torch.bfloat16),
        }
        weights[layer] = codes.float() * scale.bfloat16().float()
    save(model, work / "tensor", {"quant_method": "fp8", "activation_scheme": "static"}, tensors)
    store(out, "published-fp8-tensor", work / "tensor", weights, (), "Mistral's layout")

    from transformers import GptOssConfig, GptOssForCausalLM

    config = GptOssConfig(
        vocab_size=WORDS, hidden_size=64, intermediate_size=96, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=1, head_dim=32, num_local_experts=3,
        num_experts_per_tok=2, max_position_embeddings=64, architectures=["GptOssForCausalLM"],
    )  # fmt: skip
    model, tensors, weights = GptOssForCausalLM(config).bfloat16(), {}, {}
    with torch.no_grad():
        for seed, (_, parameter) in enumerate(sorted(model.named_parameters())):
            if parameter.ndim == 2 and min(parameter.shape) > 3:
                parameter.copy_(repeating(*parameter.shape, seed=seed))
    experts = "model.layers.0.mlp.experts"
    generator = torch.Generator().manual_seed(0)
    for packed, rows, columns in (("gate_up_proj", 192, 64), ("down_proj", 64, 96)):
        shape = (3, rows, columns // 32)
        tensors |= {
            f"{experts}.{packed}_blocks": torch.randint(0, 256, (3, 4, columns // 32, 16),
                generator=generator, dtype=torch.uint8).repeat(1, rows // 4, 1, 1),
            f"{experts}.{packed}_scales": torch.randint(115, 125, shape,
                generator=generator, dtype=torch.uint8),
            f"{experts}.{packed}_bias": (torch.arange(3 * rows) / 1024).view(3, rows).bfloat16(),
        }  # fmt: skip
        wide = convert_moe_packed_tensors(
            tensors[f"{experts}.{packed}_blocks"], tensors[f"{experts}.{packed}_scales"]
        ).mT  # [experts, rows, columns]
        for index in range(3):
            if packed == "down_proj":
                weights[f"{experts}.{index}.down_proj"] = wide[index]
            else:
                weights[f"{experts}.{index}.gate_proj"] = wide[index, ::2]
                weights[f"{experts}.{index}.up_proj"] = wide[index, 1::2]
    tensors |= {n: t for n, t in model.state_dict().items() if "experts" not in n}
    save(model, work / "gpt-oss", {"quant_method": "mxfp4"}, tensors)
    store(
        out,
        "published-gpt-oss-mxfp4",
        work / "gpt-oss",
        weights,
        (),
        "OpenAI's layout; dequantized by transformers' convert_moe_packed_tensors",
    )

    model, tensors, weights = tiny_llama(torch.float16), {}, {}
    for layer, module in linears(model):
        weight = module.weight.detach().float().unflatten(1, (-1, 64))
        low, high = weight.amin(-1, keepdim=True), weight.amax(-1, keepdim=True)
        scale, bias = ((high - low) / 15).half(), low.half()
        codes = ((weight - bias) / scale).round().clamp(0, 15).to(torch.int64)
        words = codes.flatten(1).unflatten(1, (-1, 8)) << torch.arange(0, 32, 4)
        tensors |= {
            f"{layer}.weight": words.sum(-1).to(torch.uint32),
            f"{layer}.scales": scale.squeeze(-1),
            f"{layer}.biases": bias.squeeze(-1),
        }
        weights[layer] = (scale.float() * codes + bias.float()).flatten(1)
    folder = work / "mlx"
    save(model, folder, {}, tensors)
    config = json.loads((folder / "config.json").read_text())
    settings = {"group_size": 64, "bits": 4, "mode": "affine"}
    config |= {"quantization": settings, "quantization_config": settings}
    (folder / "config.json").write_text(json.dumps(config, default=str))
    store(out, "published-mlx-affine4", folder, weights, (), "MLX's layout (mlx.core.quantize)")


TOOLS: dict[str, Callable[[Path, Path], None]] = {
    f.__name__: f
    for f in (
        *(compressed_tensors, torchao, bitsandbytes, auto_round, quanto, hqq, modelopt),
        *(modelopt_small, published, gguf),
    )
}

if __name__ == "__main__":
    import tempfile

    torch.manual_seed(0)
    target = Path(sys.argv[2])
    target.mkdir(parents=True, exist_ok=True)
    scratch = Path(sys.argv[3]) if len(sys.argv) > 3 else Path(tempfile.mkdtemp())
    TOOLS[sys.argv[1]](target, scratch)
