"""transformers' own models over the pool: token for token what `generate` gives, and refusal of what cannot be."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from model_families_rig import SMALL, save_random
from model_rig import load_rig

from engine.checkpoint import open_checkpoint
from engine.config import EngineConfig
from engine.models.fallback import canonical, kv_sizes, why_not
from engine.models.hf import HFModel
from engine.runner import load_model
from kvstore.errors import SettingsError

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt-neox": ("GPTNeoXConfig", {"pad_token_id": 0, "num_key_value_heads": 6}),
    "olmo2": ("Olmo2Config", {"pad_token_id": 0}),
    "gemma": ("GemmaConfig", {"pad_token_id": 0, "head_dim": 16}),
    "phi": ("PhiConfig", {"pad_token_id": 0, "partial_rotary_factor": 0.5, "hidden_size": 96}),
    "granite": ("GraniteConfig", {"pad_token_id": 0, "attention_multiplier": 0.3, "logits_scaling": 2.0}),
    "glm": ("GlmConfig", {"pad_token_id": 0, "head_dim": 16, "attention_bias": True}),
    "starcoder2": ("Starcoder2Config", {"pad_token_id": 0, "sliding_window": None}),
    "cohere": ("CohereConfig", {"pad_token_id": 0}),
    "gpt2": ("GPT2Config", {"n_embd": 48, "n_layer": 3, "n_head": 6, "n_positions": 256, "num_key_value_heads": 6}),
}


@pytest.mark.parametrize("name", MODELS)
def test_tokens_match_transformers(tmp_path: Path, name: str) -> None:
    model = save_random(tmp_path, *MODELS[name])
    rig = load_rig(str(tmp_path), page=8)
    assert isinstance(rig.model, HFModel)
    prompt = torch.randint(3, 97, (1, 45), generator=torch.Generator().manual_seed(1))
    ids = [int(token) for token in prompt[0]]
    with torch.no_grad():
        logits = model(prompt).logits[0]
    found = rig.prefill(rig.runner(16), ids, [7, 3, 9, 1, 12, 4, 0, 2, 5], chunk=13)
    torch.testing.assert_close(found, logits[-1], rtol=1e-3, atol=1e-3)
    out = model.generate(prompt, max_new_tokens=16, do_sample=False, attention_mask=torch.ones_like(prompt))
    assert rig.generate(ids, 16, chunk=20, fill=float("nan")) == [int(token) for token in out[0, 45:]]


def refusal(folder: Path) -> str:
    with pytest.raises(SettingsError) as caught:
        load_model(EngineConfig(model=str(folder), cpu_threads=1))
    return str(caught.value)


@pytest.mark.parametrize(
    ("kind", "options", "reason"),
    [
        ("Gemma2Config", {"head_dim": 16}, "soft-capped attention"),
        ("MistralConfig", {"sliding_window": 64, "architectures": ["Starcoder2ForCausalLM"]}, "sliding window of 64"),
        ("BloomConfig", {"n_layer": 3, "n_head": 6}, "attention in transformers cannot be replaced"),
    ],
)
def test_what_the_pool_cannot_hold_is_refused(tmp_path: Path, kind: str, options: dict[str, Any], reason: str) -> None:
    config = getattr(transformers, kind)(**(SMALL | {"pad_token_id": 0} | options))
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    if "architectures" in options:
        settings = json.loads((tmp_path / "config.json").read_text())
        (tmp_path / "config.json").write_text(json.dumps(settings | {"architectures": options["architectures"]}))
    assert reason in refusal(tmp_path)


@pytest.mark.parametrize(
    ("architecture", "config", "reason"),
    [
        ("MambaForCausalLM", {}, "state-space layers"),
        ("DeepseekV3ForCausalLM", {"kv_lora_rank": 512}, "latent attention (MLA)"),
        (
            "Qwen3NextForCausalLM",
            {"layer_types": ["linear_attention", "full_attention"]},
            "layers of type linear_attention",
        ),
        ("T5ForConditionalGeneration", {}, "no decoder-only language model"),
        ("BartForCausalLM", {"is_encoder_decoder": True}, "an encoder-decoder model"),
    ],
)
def test_refusals_by_configuration(architecture: str, config: dict[str, Any], reason: str) -> None:
    assert why_not(config, architecture) == reason


def test_without_transformers_the_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "trtllm-disagg[hf]" in str(why_not({}, "GemmaForCausalLM"))


def test_the_refusal_lists_what_is_supported(tmp_path: Path) -> None:
    save_random(tmp_path, *MODELS["gpt-neox"])
    settings = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(settings | {"architectures": ["RwkvForCausalLM"]}))
    with pytest.raises(SettingsError, match=r"RwkvForCausalLM.*state-space.*LlamaForCausalLM, .*full attention"):
        open_checkpoint(str(tmp_path))


def test_attention_that_disagrees_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison at load time: a model whose attention does more than the pool's is not served."""
    save_random(tmp_path, *MODELS["gemma"])
    monkeypatch.setattr("engine.models.hf.paged_attention", lambda query, *rest: torch.zeros_like(query))
    assert "paged attention is off by" in refusal(tmp_path)


def test_a_layer_without_attention_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_random(tmp_path, *MODELS["gemma"])
    monkeypatch.setattr("engine.models.fallback.kv_sizes", lambda config: (4, 2, 16))
    assert "of its 4 layers, 3 use ordinary attention" in refusal(tmp_path)


def test_older_names_of_sizes() -> None:
    found = canonical({"n_layer": 2, "n_head": 4, "n_embd": 64, "n_positions": 128, "multi_query": True})
    assert found["max_position_embeddings"] == 128
    assert kv_sizes(found) == (2, 1, 16)
