"""GGUF checkpoints without torch: metadata as a Hugging Face configuration, tensors under Hugging Face names in
float32, and the byte-level BPE tokenizer as the JSON that `tokenizers` loads.

The file is mapped, not read: what is not asked for costs nothing. Layout of a GGUF file, all little-endian: magic,
version, counts; key-value metadata; one descriptor a tensor; padding; tensor data.
"""

from __future__ import annotations

import dataclasses
import json
import mmap
import re
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from kvstore.errors import SettingsError

_MAGIC = b"GGUF"
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9

ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
"""`general.architecture` to the Hugging Face class of the same weights (Mistral files call themselves llama)."""


@dataclasses.dataclass(frozen=True, slots=True)
class TensorEntry:
    shape: tuple[int, ...]  # outermost first, as in Hugging Face checkpoints
    kind: int  # ggml quantisation type
    offset: int  # bytes from the start of the file


class GgufFile:
    """An open GGUF file. `metadata` holds every key-value pair; arrays are lists. Raises SettingsError if broken."""

    def __init__(self, path: str) -> None:
        self.path = path
        with open(path, "rb") as file:
            if len(file.read(24)) < 24:
                raise SettingsError([("model", f"{path} is not a GGUF file: it is shorter than a header")])
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self.metadata: dict[str, Any] = {}
        self.tensors: dict[str, TensorEntry] = {}
        try:
            self._read_header()
        except (struct.error, IndexError, UnicodeDecodeError, KeyError) as error:
            raise SettingsError([("model", f"{path} is not a complete GGUF file: {error!r}")]) from error

    def _read_header(self) -> None:
        if self._map[:4] != _MAGIC:
            raise SettingsError([("model", f"{self.path} is not a GGUF file: it begins with {self._map[:4]!r}")])
        version, tensor_count, pair_count = struct.unpack_from("<IQQ", self._map, 4)
        if version not in (2, 3):
            raise SettingsError([("model", f"{self.path} has GGUF version {version}; 2 and 3 are supported")])
        at = 24
        for _ in range(pair_count):
            key, at = self._string(at)
            self.metadata[key], at = self._value(at + 4, self._unpack("I", at))
        descriptors = []
        for _ in range(tensor_count):
            name, at = self._string(at)
            rank = self._unpack("I", at)
            *dims, kind, offset = struct.unpack_from(f"<{rank}QIQ", self._map, at + 4)
            at += 4 + 8 * rank + 12
            descriptors.append((name, tuple(reversed(dims)), kind, offset))
        alignment = self.metadata.get("general.alignment", 32)
        data_start = -(-at // alignment) * alignment
        self.tensors = {
            name: TensorEntry(shape, kind, data_start + offset) for name, shape, kind, offset in descriptors
        }

    def _unpack(self, code: str, at: int) -> Any:
        return struct.unpack_from("<" + code, self._map, at)[0]

    def _string(self, at: int) -> tuple[str, int]:
        end = at + 8 + self._unpack("Q", at)
        return str(self._map[at + 8 : end], "utf-8"), end

    def _value(self, at: int, kind: int) -> tuple[Any, int]:
        if kind in _SCALARS:
            code = _SCALARS[kind]
            return self._unpack(code, at), at + struct.calcsize("<" + code)
        if kind == _STRING:
            return self._string(at)
        if kind != _ARRAY:
            raise SettingsError([("model", f"{self.path}: metadata type {kind} is unknown")])
        element, count = struct.unpack_from("<IQ", self._map, at)
        at += 12
        if element in _SCALARS:
            layout = struct.Struct(f"<{count}{_SCALARS[element]}")
            return list(layout.unpack_from(self._map, at)), at + layout.size
        values = []
        for _ in range(count):
            value, at = self._value(at, element)
            values.append(value)
        return values, at

    def dequantised(self, name: str) -> npt.NDArray[np.float32]:
        """The tensor of this GGUF name as float32, outermost dimension first."""
        from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
        from gguf.quants import dequantize

        entry = self.tensors[name]
        kind = GGMLQuantizationType(entry.kind)
        per_block, block_bytes = GGML_QUANT_SIZES[kind]
        rows = (*entry.shape[:-1], entry.shape[-1] // per_block * block_bytes)
        size = int(np.prod(rows))
        if entry.offset + size > len(self._map):
            raise SettingsError([("model", f"{self.path} is cut short: tensor {name} ends past the end of the file")])
        raw = np.frombuffer(self._map, np.uint8, size, entry.offset).reshape(rows)
        try:
            values = dequantize(raw, kind)
        except NotImplementedError as error:
            raise SettingsError([("model", f"{self.path}: tensor {name} is {kind.name}: {error}")]) from error
        # Unquantised tensors come as views of the read-only mapping; owners of tensors expect to own their memory.
        return np.require(values, np.float32, ["W", "O"]).reshape(entry.shape)


# ---------------------------------------------------------------- configuration


def hf_config(file: GgufFile) -> dict[str, Any]:
    """The metadata under the names of a Hugging Face `config.json`."""
    meta = file.metadata
    arch = meta.get("general.architecture", "")
    if arch not in ARCHITECTURES:
        raise SettingsError([("model", f"{file.path}: GGUF architecture {arch!r}; supported: {sorted(ARCHITECTURES)}")])

    def number(key: str, default: Any = None) -> Any:
        value = meta.get(f"{arch}.{key}", default)
        if value is None:
            raise SettingsError([("model", f"{file.path}: metadata key {arch}.{key} is missing")])
        return value

    def decimal(key: str, default: float | None = None) -> float:
        """The file has 32-bit floats; the shortest decimal of one is what the original configuration said."""
        return float(str(np.float32(number(key, default))))

    heads, hidden = number("attention.head_count"), number("embedding_length")
    return {
        "architectures": [ARCHITECTURES[arch]],
        "model_type": arch,
        "hidden_size": hidden,
        "intermediate_size": number("feed_forward_length"),
        "num_hidden_layers": number("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": number("attention.head_count_kv", heads),
        "head_dim": meta.get(f"{arch}.attention.key_length", hidden // heads),
        "max_position_embeddings": number("context_length"),
        "rms_norm_eps": decimal("attention.layer_norm_rms_epsilon"),
        "rope_parameters": {"rope_theta": decimal("rope.freq_base", 1e4), **_rotation(file, arch)},
        "hidden_act": "silu",
        "vocab_size": file.tensors["token_embd.weight"].shape[0],
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "bos_token_id": meta.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": meta.get("tokenizer.ggml.eos_token_id"),
    }


def _rotation(file: GgufFile, arch: str) -> dict[str, Any]:
    """How positions are scaled: one divisor a frequency as a tensor (Llama 3), or a scheme in the metadata."""
    meta, scaling = file.metadata, f"{arch}.rope.scaling"
    whole = meta[f"{arch}.embedding_length"] // meta[f"{arch}.attention.head_count"]
    head_dim = meta.get(f"{arch}.attention.key_length", whole)
    turned = meta.get(f"{arch}.rope.dimension_count", head_dim)
    part = {} if turned == head_dim else {"partial_rotary_factor": turned / head_dim}
    if _ROPE_FACTORS in file.tensors:
        return {**part, "rope_type": "factors", "factors": [float(each) for each in file.dequantised(_ROPE_FACTORS)]}
    scheme = meta.get(f"{scaling}.type", "none")
    if scheme == "none":
        return {**part, "rope_type": "default"}
    if scheme not in ("linear", "yarn"):
        raise SettingsError(
            [("model", f"{file.path}: {scaling}.type {scheme!r}; supported: none, linear, yarn, rope_freqs.weight")]
        )
    found = {**part, "rope_type": scheme, "factor": float(meta[f"{scaling}.factor"])}
    original = meta.get(f"{scaling}.original_context_length")
    return found if original is None else {**found, "original_max_position_embeddings": original}


# ---------------------------------------------------------------- tensors

_ROPE_FACTORS = "rope_freqs.weight"

_TOP_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_LAYER_TENSOR = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")


def hf_tensor_names(file: GgufFile) -> dict[str, str]:
    """Hugging Face tensor name to GGUF tensor name. A tensor without a known role is an error."""
    names = {}
    for name in file.tensors:
        if name == _ROPE_FACTORS:  # part of the configuration
            continue
        if name in _TOP_NAMES:
            names[_TOP_NAMES[name]] = name
            continue
        match = _LAYER_TENSOR.fullmatch(name)
        if match is None or match[2] not in _LAYER_NAMES:
            raise SettingsError([("model", f"{file.path}: tensor {name!r} is none of a Llama-like model")])
        names[f"model.layers.{match[1]}.{_LAYER_NAMES[match[2]]}.{match[3]}"] = name
    return names


def hf_tensor(file: GgufFile, gguf_name: str) -> npt.NDArray[np.float32]:
    """One tensor as Hugging Face's model code wants it.

    llama.cpp interleaves the two halves of every rotary head in the `llama` architecture; they are put back.
    """
    values = file.dequantised(gguf_name)
    if file.metadata["general.architecture"] != "llama":
        return values
    match = _LAYER_TENSOR.fullmatch(gguf_name)
    if match is None or match[2] not in ("attn_q", "attn_k"):
        return values
    heads = file.metadata["llama.attention.head_count"]
    if match[2] == "attn_k":
        heads = file.metadata.get("llama.attention.head_count_kv", heads)
    halves = values.reshape(heads, values.shape[0] // heads // 2, 2, *values.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(values.shape)


# ---------------------------------------------------------------- tokenizer


@dataclasses.dataclass(frozen=True, slots=True)
class GgufTokenizer:
    tokenizer_json: str  # for tokenizers.Tokenizer.from_str
    chat_template: str | None  # Jinja source
    bos_token: str | None
    eos_token: str | None
    unk_token: str | None
    pad_token: str | None
    bos_token_id: int | None
    eos_token_id: int | None
    unk_token_id: int | None
    pad_token_id: int | None
    add_bos_token: bool  # a prompt that is plain text begins with BOS (the JSON's post-processor does it)


_CONTROL, _USER_DEFINED = 3, 4  # tokenizer.ggml.token_type
_BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}


def _split_by(pattern: str) -> dict[str, Any]:
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    return {"type": "Sequence", "pretokenizers": [split, {**_BYTE_LEVEL, "use_regex": False}]}


def _gpt2_rules() -> dict[str, Any]:
    return {**_BYTE_LEVEL, "use_regex": True}


def _digit_rules() -> dict[str, Any]:
    digits = {"type": "Digits", "individual_digits": True}
    return {"type": "Sequence", "pretokenizers": [digits, _gpt2_rules()]}


def _word_rules(numbers: str) -> dict[str, Any]:
    return _split_by(
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
        + numbers
        + r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )


_PRE_TOKENIZERS: dict[str, Callable[[], dict[str, Any]]] = {
    **dict.fromkeys(("default", "gpt-2", "gpt2", "olmo", "phi-2"), _gpt2_rules),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell"), _digit_rules),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral"), lambda: _word_rules(r"\p{N}{1,3}")),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "megrez"), lambda: _word_rules(r"\p{N}")),
}
"""`tokenizer.ggml.pre` to how text is cut into words before merging, in llama.cpp's rules."""


def _added_tokens(tokens: list[str], kinds: list[int]) -> Iterator[dict[str, Any]]:
    for token_id, (content, kind) in enumerate(zip(tokens, kinds, strict=False)):
        if kind in (_CONTROL, _USER_DEFINED):
            yield {
                "id": token_id,
                "content": content,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": kind == _CONTROL,
            }


def _begin_with(token: str, token_id: int) -> dict[str, Any]:
    bos = {"SpecialToken": {"id": token, "type_id": 0}}
    text_a, text_b = {"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}
    return {
        "type": "TemplateProcessing",
        "single": [bos, text_a],
        "pair": [bos, text_a, text_b],
        "special_tokens": {token: {"id": token, "ids": [token_id], "tokens": [token]}},
    }


def read_tokenizer(path: str) -> GgufTokenizer:
    """The tokenizer inside a GGUF file. SettingsError if it is not a byte-level BPE with known word rules."""
    return tokenizer_of(GgufFile(path))


def tokenizer_of(file: GgufFile) -> GgufTokenizer:
    meta = file.metadata
    model, rules = meta.get("tokenizer.ggml.model"), meta.get("tokenizer.ggml.pre", "default")
    if model != "gpt2":
        raise SettingsError([("tokenizer", f"{file.path}: tokenizer.ggml.model {model!r}; supported: 'gpt2'")])
    if rules not in _PRE_TOKENIZERS:
        allowed = sorted(_PRE_TOKENIZERS)
        raise SettingsError([("tokenizer", f"{file.path}: tokenizer.ggml.pre {rules!r}; supported: {allowed}")])
    tokens: list[str] = meta["tokenizer.ggml.tokens"]
    ids = {
        role: meta.get(f"tokenizer.ggml.{key}_token_id")
        for role, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding"))
    }
    texts = {role: None if token_id is None else tokens[token_id] for role, token_id in ids.items()}
    add_bos = bool(meta.get("tokenizer.ggml.add_bos_token", False)) and ids["bos"] is not None
    pre_tokenizer = _PRE_TOKENIZERS[rules]()
    state = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": list(_added_tokens(tokens, meta.get("tokenizer.ggml.token_type", []))),
        "normalizer": {"type": "NFC"} if rules in ("qwen2", "deepseek-r1-qwen", "megrez") else None,
        "pre_tokenizer": pre_tokenizer,
        "post_processor": _begin_with(str(texts["bos"]), int(ids["bos"] or 0)) if add_bos else None,
        "decoder": {**_BYTE_LEVEL, "use_regex": True},
        "model": {
            "type": "BPE",
            "ignore_merges": rules in ("llama-bpe", "llama3", "llama-v3"),
            "byte_fallback": False,
            "fuse_unk": False,
            "vocab": {token: token_id for token_id, token in enumerate(tokens)},
            "merges": [merge.split(" ", 1) for merge in meta.get("tokenizer.ggml.merges", [])],
        },
    }
    return GgufTokenizer(
        tokenizer_json=json.dumps(state, ensure_ascii=False),
        chat_template=meta.get("tokenizer.chat_template"),
        add_bos_token=add_bos,
        **{f"{role}_token": text for role, text in texts.items()},
        **{f"{role}_token_id": token_id for role, token_id in ids.items()},
    )


def is_gguf(path: str) -> bool:
    return Path(path).suffix == ".gguf"
