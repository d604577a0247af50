"""Small random checkpoints of each supported architecture against transformers, and refusal of what is not computed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from model_families_rig import SMALL, save_random
from model_rig import load_rig, make_pool
from safetensors.torch import load_file, save_file

from engine.checkpoint import open_checkpoint
from engine.config import EngineConfig
from engine.models.llama import LlamaShape
from engine.models.rope import inverse_frequencies
from engine.runner import Runner, load_model, set_threads
from engine.step import Chunk
from engine.weights import Weights
from kvstore.errors import SettingsError

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 500.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 8.0,
    "beta_slow": 1.0,
}
MOE: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "head_dim": 16, "use_sliding_window": False}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {"tie_word_embeddings": False}),
    "llama-biases": ("LlamaConfig", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    "llama3-rope": ("LlamaConfig", {"rope_parameters": LLAMA3_ROPE}),
    "linear-rope": ("LlamaConfig", {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 100.0}}),
    "dynamic-rope": ("LlamaConfig", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 100.0}}),
    "yarn-rope": ("LlamaConfig", {"rope_parameters": YARN_ROPE}),
    "yarn-mscale": ("LlamaConfig", {"rope_parameters": YARN_ROPE | {"mscale": 1.0, "mscale_all_dim": 0.7}}),
    "yarn-unrounded": ("LlamaConfig", {"rope_parameters": YARN_ROPE | {"truncate": False, "attention_factor": 1.3}}),
    "smollm3": ("SmolLM3Config", {"num_hidden_layers": 5, "no_rope_layer_interval": 2, "pad_token_id": 0}),
    "smollm3-named": ("SmolLM3Config", {"no_rope_layers": [1, 0, 1], "pad_token_id": 0, "tie_word_embeddings": False}),
    "phi3": ("Phi3Config", {"pad_token_id": 0, "sliding_window": None}),
    "phi3-partial": ("Phi3Config", {"pad_token_id": 0, "hidden_size": 96, "partial_rotary_factor": 0.75}),
    "qwen3-moe": (
        "Qwen3MoeConfig",
        MOE | {"mlp_only_layers": [1], "norm_topk_prob": True, "moe_intermediate_size": 40},
    ),
    "qwen3-moe-plain": ("Qwen3MoeConfig", MOE | {"decoder_sparse_step": 2, "moe_intermediate_size": 40}),
    "mixtral": ("MixtralConfig", {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None}),
    "mistral": ("MistralConfig", {"sliding_window": None, "head_dim": 16}),
    "qwen2": ("Qwen2Config", {"use_sliding_window": False}),
    "qwen3": ("Qwen3Config", {"head_dim": 16, "tie_word_embeddings": True, "use_sliding_window": False}),
    "one-kv-head": ("LlamaConfig", {"num_key_value_heads": 1}),
    "no-gqa": ("LlamaConfig", {"num_key_value_heads": 6}),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_and_tokens_match_transformers(tmp_path: Path, family: str) -> None:
    model = save_random(tmp_path, *FAMILIES[family])
    rig = load_rig(str(tmp_path), page=8)
    prompt = torch.randint(3, 97, (1, 45), generator=torch.Generator().manual_seed(1))
    ids = [int(token) for token in prompt[0]]
    with torch.no_grad():
        logits = model(prompt).logits[0]
    runner = rig.runner(16)
    table = [7, 3, 9, 1, 12, 4, 0, 2, 5]
    torch.testing.assert_close(rig.prefill(runner, ids, table, chunk=13), logits[-1], rtol=1e-4, atol=1e-4)
    out = model.generate(prompt, max_new_tokens=16, do_sample=False, attention_mask=torch.ones_like(prompt))
    assert rig.generate(ids, 16) == [int(token) for token in out[0, 45:]]


def test_sharded_checkpoint(tmp_path: Path) -> None:
    save_random(tmp_path / "whole", "LlamaConfig", {})
    save_random(tmp_path / "parts", "LlamaConfig", {}, shards="60KB")
    whole, parts = load_rig(str(tmp_path / "whole")), load_rig(str(tmp_path / "parts"))
    assert len(parts.checkpoint.weight_files) > 1
    assert parts.generate([5, 6, 7], 12) == whole.generate([5, 6, 7], 12)


def test_every_row_wanted_is_given_in_chunk_order(tmp_path: Path) -> None:
    save_random(tmp_path, "LlamaConfig", {})
    rig = load_rig(str(tmp_path))
    runner = rig.runner(8)
    chunks = [
        Chunk([5, 6, 7], 0, [0], True),
        Chunk([8], 0, [1], True),
        Chunk([9, 10], 0, [2], False),
        Chunk([11, 12], 0, [3], True),
    ]
    together = runner.run(chunks)
    alone = [runner.run([chunk]) for chunk in chunks]
    assert alone[2].shape == (0, 97)
    torch.testing.assert_close(together, torch.cat(alone), rtol=0, atol=1e-5)
    assert runner.run([]).shape == (0, 97)


@pytest.mark.parametrize("chunk", [Chunk([], 0, [0], True), Chunk([1] * 33, 0, [0], True), Chunk([1], 32, [0], True)])
def test_impossible_chunks_are_refused(tmp_path: Path, chunk: Chunk) -> None:
    save_random(tmp_path, "LlamaConfig", {})
    with pytest.raises(ValueError, match="chunk: "):
        load_rig(str(tmp_path)).runner(4).run([chunk])


# ---------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("change", "field"),
    [({"sliding_window": 128}, "sliding_window"), ({"hidden_act": "gelu"}, "hidden_act")],
)
def test_unsupported_configurations_are_refused_by_name(change: dict[str, Any], field: str) -> None:
    with pytest.raises(SettingsError, match=field):
        LlamaShape.of(SMALL | change)


def test_unsupported_rope_is_refused() -> None:
    with pytest.raises(SettingsError, match=r"longrope.*supported: default, dynamic, factors, linear, llama3, yarn"):
        inverse_frequencies({"rope_scaling": {"type": "longrope"}}, 8)


def test_a_window_that_is_switched_off_is_no_window() -> None:
    assert LlamaShape.of(SMALL | {"sliding_window": 128, "use_sliding_window": False}).layers == 3


def edit_weights(folder: Path, change: dict[str, torch.Tensor | None]) -> None:
    tensors = {**load_file(folder / "model.safetensors"), **change}
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, folder / "model.safetensors")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model.norm.weight": None}, "no tensor 'model.norm.weight'"),
        ({"model.norm.weight": torch.ones(47)}, r"\(47,\), not \(48,\)"),
        ({"model.layers.1.self_attn.k_proj.bias": torch.ones(16)}, "only some of"),
    ],
)
def test_wrong_tensors_are_refused(tmp_path: Path, change: dict[str, torch.Tensor | None], message: str) -> None:
    save_random(tmp_path, "LlamaConfig", {})
    edit_weights(tmp_path, change)
    with pytest.raises(SettingsError, match=message):
        load_rig(str(tmp_path))


def test_broken_weight_file_is_refused(tmp_path: Path) -> None:
    save_random(tmp_path, "LlamaConfig", {})
    (tmp_path / "model.safetensors").write_bytes(b"\xff" * 64)
    with pytest.raises(SettingsError, match=r"model\.safetensors cannot be read"):
        load_rig(str(tmp_path))


def test_unknown_dtype_is_refused(tmp_path: Path) -> None:
    save_random(tmp_path, "LlamaConfig", {})
    with pytest.raises(SettingsError, match=r"int4.*allowed: auto, float32"):
        load_model(EngineConfig(model=str(tmp_path), dtype="int4", cpu_threads=1))


def test_progress_is_told_by_tenths_or_seconds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_random(tmp_path, "LlamaConfig", {"num_hidden_layers": 12})
    checkpoint = open_checkpoint(str(tmp_path))
    now = 0.0
    monkeypatch.setattr("engine.weights.time.monotonic", lambda: now)
    for seconds, fewest, most in ((0.0, 9, 12), (1.0, 100, 200)):
        told: list[float] = []
        with Weights(checkpoint, told.append) as weights:
            for name in weights.names():
                now += seconds
                weights.get(name, tuple(load_file(tmp_path / "model.safetensors")[name].shape), torch.float32)
        assert told == sorted(told) and told[-1] == 1.0
        assert fewest <= len(told) <= most


def test_weights_are_read_from_the_mapped_file(tmp_path: Path) -> None:
    """No second copy: what is kept is made from pages of the file."""
    save_random(tmp_path, "LlamaConfig", {"hidden_size": 768, "vocab_size": 8192})
    checkpoint = open_checkpoint(str(tmp_path))
    with Weights(checkpoint) as weights:
        before = psutil.Process().memory_info()
        tensor = weights._mapped("model.embed_tokens.weight", (8192, 768))
        after = psutil.Process().memory_info()
        assert tensor.numel() * 4 > 20 << 20
        assert (after.rss - after.shared) - (before.rss - before.shared) < 8 << 20


@pytest.mark.parametrize("method", ["gptq", "awq", "fp8"])
def test_quantised_checkpoints_are_refused(tmp_path: Path, method: str) -> None:
    save_random(tmp_path, "LlamaConfig", {})
    settings = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(settings | {"quantization_config": {"quant_method": method}}))
    with pytest.raises(SettingsError, match=rf"'{method}' is not supported; supported: float32, .*GGUF.*int8"):
        open_checkpoint(str(tmp_path))


def test_ranks_share_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[int] = []
    monkeypatch.setattr("torch.set_num_threads", given.append)
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(8)))
    for settings in ({}, {"tp_size": 2}, {"tp_size": 16}, {"tp_size": 2, "cpu_threads": 3}):
        set_threads(EngineConfig(model="tiny", **settings))
    assert given == [8, 4, 1, 3]


def test_progress_ends_at_one(tmp_path: Path) -> None:
    save_random(tmp_path, "LlamaConfig", {})
    seen: list[tuple[str, float]] = []
    model = load_model(EngineConfig(model=str(tmp_path), cpu_threads=1), lambda stage, done: seen.append((stage, done)))
    assert seen[0] == ("weights", 0.0) and seen[-1] == ("weights", 1.0)
    assert [done for _, done in seen] == sorted(done for _, done in seen)
    assert model.vocab_size == 97


@pytest.mark.parametrize("family", ["llama-biases", "qwen3", "smollm3", "phi3-partial", "mixtral"])
def test_bfloat16_runs_close_to_transformers(tmp_path: Path, family: str) -> None:
    kind, options = FAMILIES[family]
    model = save_random(tmp_path, kind, options | {"initializer_range": 0.05}).to(torch.bfloat16)
    checkpoint = open_checkpoint(str(tmp_path))
    config = EngineConfig(model=str(tmp_path), dtype="bfloat16", cpu_threads=1)
    ids = [5, 6, 7, 8, 40, 33]
    with torch.no_grad():
        expected = model(torch.tensor([ids])).logits[0, -1:].float()
    found = Runner(config, checkpoint, make_pool(checkpoint, 4, dtype=torch.bfloat16)).run([Chunk(ids, 0, [2], True)])
    assert found.dtype == torch.float32
    assert float((found - expected).norm() / expected.norm()) < 0.03


def test_fixture_has_the_config_it_says(tmp_path: Path) -> None:
    """Guards the comparisons above: a configuration class may drop an option that it does not know."""
    save_random(tmp_path, *FAMILIES["llama-biases"])
    assert json.loads((tmp_path / "config.json").read_text())["attention_bias"] is True
    assert "model.layers.0.mlp.down_proj.bias" in load_file(tmp_path / "model.safetensors")
