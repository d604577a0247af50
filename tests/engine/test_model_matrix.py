"""Forms of weight matrices: their products, their independence of the batch, and a model with 8-bit weights."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tokenizers
import torch
from model_families_rig import save_random
from model_rig import TINY, load_rig, make_pool

from engine.checkpoint import open_checkpoint
from engine.config import EngineConfig
from engine.models.matrix import (
    Int8Matrix,
    Matrix,
    MatrixForm,
    PackedMatrix,
    add_product,
    bfloat16_is_fast,
    can_pack,
    cpu_form,
    multiply,
    plain,
)
from engine.runner import Runner, load_model, weights_identity
from engine.step import Chunk
from kvstore.errors import SettingsError

needs_packing = pytest.mark.skipif(not can_pack(torch.float32), reason="torch without oneDNN")
FORMS = [
    pytest.param(plain, 1e-5, id="plain"),
    pytest.param(PackedMatrix, 1e-5, id="packed", marks=needs_packing),
    pytest.param(Int8Matrix, 0.02, id="int8"),
]


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.mark.parametrize(("form", "error"), FORMS)
@pytest.mark.parametrize("rows", [1, 2, 5, 16, 130])
def test_products(form: MatrixForm, error: float, rows: int) -> None:
    weight, bias, x, base = random(72, 48), random(72), random(rows, 48), random(rows, 72)
    matrix = form(weight)
    exact = x @ weight.t()
    for found, expected in (
        (multiply(x, matrix), exact),
        (multiply(x, matrix, bias), exact + bias),
        (add_product(x, matrix, None, base), base + exact),
        (add_product(x, matrix, bias, base), base + exact + bias),
    ):
        assert float((found - expected).norm() / exact.norm()) < error


@pytest.mark.parametrize(("form", "error"), FORMS[1:])
@pytest.mark.parametrize("dims", [(64, 48), (576, 320), (1536, 64)])
def test_a_row_does_not_depend_on_its_neighbours(form: MatrixForm, error: float, dims: tuple[int, int]) -> None:
    inner, outs = dims
    matrix: Matrix = form(random(outs, inner))
    x = random(40, inner) * torch.logspace(-2, 2, 40)[:, None]
    together = multiply(x, matrix)
    for rows in (1, 2, 7, 16, 33):
        assert torch.equal(multiply(x[:rows], matrix), together[:rows])


def test_a_form_keeps_no_view_of_the_weight() -> None:
    """Weights come from mapped files, which are closed once the model is made."""
    for form in (plain, cpu_form("auto", torch.float32), Int8Matrix):
        weight, x = random(8, 16), random(2, 16)
        matrix = form(weight)
        before = multiply(x, matrix).clone()
        weight.zero_()
        assert torch.equal(multiply(x, matrix), before)


def test_zero_rows_and_zero_weights() -> None:
    assert not multiply(torch.zeros(3, 16), Int8Matrix(torch.zeros(8, 16))).any()


def test_bfloat16_rows_keep_their_dtype() -> None:
    assert multiply(random(2, 16).bfloat16(), Int8Matrix(random(8, 16))).dtype == torch.bfloat16


@pytest.mark.parametrize(("flags", "fast"), [("avx2 avx512_bf16", True), ("amx_bf16", True), ("avx2 avx512f", False)])
def test_which_cpu_computes_bfloat16(tmp_path: Path, flags: str, fast: bool) -> None:
    (tmp_path / "cpuinfo").write_text(f"processor\t: 0\nflags\t\t: fpu {flags}\n")
    assert bfloat16_is_fast(tmp_path / "cpuinfo") is fast
    assert bfloat16_is_fast(tmp_path / "none") is False


def test_slow_bfloat16_is_announced(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr("engine.runner.bfloat16_is_fast", lambda: False)
    load_model(EngineConfig(model=TINY, dtype="bfloat16", cpu_threads=1))
    assert "this CPU computes it in software" in caplog.text


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_every_dtype_computes(dtype: str) -> None:
    checkpoint = open_checkpoint(TINY)
    runs = {}
    for name in ("float32", dtype):
        config = EngineConfig(model=TINY, dtype=name, cpu_threads=1)
        runner = Runner(config, checkpoint, make_pool(checkpoint, 4, dtype=getattr(torch, name)))
        runs[name] = runner.run([Chunk([5, 6, 7, 8], 0, [2], True)])
    assert float((runs[dtype] - runs["float32"]).norm() / runs["float32"].norm()) < 0.05


# ---------------------------------------------------------------- models with 8-bit weights


def test_int8_answers_questions_like_float32() -> None:
    config = EngineConfig(model=TINY, cpu_threads=1, weight_dtype="int8")
    checkpoint = open_checkpoint(TINY)
    rig = load_rig(TINY)
    rig.model = load_model(config, checkpoint=checkpoint)
    tokenizer = tokenizers.Tokenizer.from_file(str(Path(TINY, "tokenizer.json")))
    prompt = "<|im_start|>user\nRepeat: apple river stone house<|im_end|>\n<|im_start|>assistant\n"
    answer = tokenizer.decode(rig.generate(tokenizer.encode(prompt).ids, 30))
    assert "apple river stone house" in answer


@pytest.mark.parametrize("kind", ["LlamaConfig", "GPTNeoXConfig"])
def test_int8_logits_are_close(tmp_path: Path, kind: str) -> None:
    save_random(tmp_path, kind, {"initializer_range": 0.1, "num_key_value_heads": 6, "pad_token_id": 0})
    checkpoint = open_checkpoint(str(tmp_path))
    logits = {}
    for name in ("auto", "int8"):
        config = EngineConfig(model=str(tmp_path), weight_dtype=name, cpu_threads=1)
        runner = Runner(config, checkpoint, make_pool(checkpoint, 4))
        logits[name] = runner.run([Chunk([5, 6, 7, 8], 0, [2], True)])
    off = float((logits["int8"] - logits["auto"]).norm() / logits["auto"].norm())
    assert 0 < off < 0.05


def test_unknown_weight_dtype_lists_the_known() -> None:
    with pytest.raises(SettingsError, match="'int3' is not supported; supported: auto, int8"):
        load_model(EngineConfig(model=TINY, weight_dtype="int3", cpu_threads=1))


def test_rounded_weights_are_another_model() -> None:
    """Their KV must not be taken for that of the exact weights."""
    checkpoint = open_checkpoint(TINY)
    names = {weights_identity(EngineConfig(model=TINY, weight_dtype=name), checkpoint) for name in ("auto", "int8")}
    assert len(names) == 2
    assert json.dumps(sorted(names))
