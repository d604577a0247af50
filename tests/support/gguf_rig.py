"""Writes the bundled model as a GGUF file, the way llama.cpp's converter lays one out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
import transformers
from model_rig import TINY
from safetensors.torch import load_file
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

CONTROL, NORMAL, USER_DEFINED = 3, 1, 4
_LAYER = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def _interleave(weight: np.ndarray, heads: int) -> np.ndarray:
    """llama.cpp's order of the rotary halves of each head."""
    return weight.reshape(heads, 2, -1, weight.shape[1]).swapaxes(1, 2).reshape(weight.shape)


def tiny_tensors(config: dict[str, Any]) -> dict[str, np.ndarray]:
    """The bundled model's tensors by GGUF name, float32."""
    tensors = {}
    for name, tensor in load_file(Path(TINY, "model.safetensors")).items():
        values = tensor.to(torch.float32).numpy()
        if name.startswith("model.layers."):
            _, _, layer, rest = name.split(".", 3)
            role, kind = rest.rsplit(".", 1)
            if role.endswith(("q_proj", "k_proj")):
                heads = config["num_attention_heads" if role.endswith("q_proj") else "num_key_value_heads"]
                values = _interleave(values, heads)
            tensors[f"blk.{layer}.{_LAYER[role]}.{kind}"] = values
        else:
            tensors[{"model.embed_tokens.weight": "token_embd.weight"}.get(name, "output_norm.weight")] = values
    return tensors


def add_tokenizer(writer: gguf.GGUFWriter, pre: str, options: dict[str, Any]) -> None:
    source = json.loads(Path(TINY, "tokenizer.json").read_text())
    added = {entry["id"] for entry in source["added_tokens"]}
    by_id = sorted(source["model"]["vocab"].items(), key=lambda item: item[1])
    kinds = [CONTROL if token_id in added else NORMAL for _, token_id in by_id]
    for token_id in options.get("user_defined", ()):
        kinds[token_id] = USER_DEFINED
    writer.add_tokenizer_model(options.get("model", "gpt2"))
    writer.add_tokenizer_pre(pre)
    writer.add_token_list([token for token, _ in by_id])
    writer.add_token_types(kinds)
    writer.add_token_merges([" ".join(merge) for merge in source["model"]["merges"]])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(0)
    writer.add_add_bos_token(options.get("add_bos", False))
    writer.add_chat_template(Path(TINY, "chat_template.jinja").read_text())


def write_tiny_gguf(path: Path, kind: str = "F32", pre: str = "gpt-2", arch: str = "llama", **options: Any) -> Path:
    """The bundled model with matrices of `kind` (a ggml quantisation), or only its tokenizer with tensors=False."""
    config = json.loads(Path(TINY, "config.json").read_text())
    writer = gguf.GGUFWriter(path, arch)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(config["vocab_size"])
    if (scheme := options.get("rope_scaling")) is not None:
        writer.add_string(gguf.Keys.Rope.SCALING_TYPE.format(arch=arch), scheme)
        writer.add_rope_scaling_factor(4.0)
        writer.add_rope_scaling_orig_ctx_len(512)
    if (turned := options.get("rope_dimensions")) is not None:
        writer.add_rope_dimension_count(turned)
    add_tokenizer(writer, pre, options)
    if options.get("tensors", True):
        quantisation = gguf.GGMLQuantizationType[kind]
        for name, values in tiny_tensors(config).items():
            if values.ndim == 1:
                writer.add_tensor(name, values)
            else:
                writer.add_tensor(name, gguf.quants.quantize(values, quantisation), raw_dtype=quantisation)
        for name in options.get("extra", ()):
            writer.add_tensor(name, np.ones(8, np.float32))
        if (factors := options.get("rope_factors")) is not None:
            writer.add_tensor("rope_freqs.weight", factors)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def transformers_from_gguf(path: Path) -> Any:
    """transformers' model with the tensors of transformers' own GGUF reader, float32."""
    config = transformers.AutoConfig.from_pretrained(path.parent, gguf_file=path.name)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    state = load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=model)["tensors"]
    missing = model.load_state_dict(state, strict=False)
    assert set(missing.missing_keys) <= {"lm_head.weight"} and not missing.unexpected_keys
    model.tie_weights()
    return model.eval()
