"""The scripted test model: its grammar, and that its answers come from the paged pool and nowhere else."""

from __future__ import annotations

from pathlib import Path

import pytest
import tokenizers
from model_rig import SCRIPTED, Rig, load_rig

from engine.checkpoint import open_checkpoint
from engine.config import EngineConfig
from engine.models.registry import load_custom_modules, model_factory
from engine.runner import load_model
from engine.step import Chunk
from kvstore.errors import SettingsError

BOS, EOS, EOS2 = 256, 257, 260
CHAT = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"


@pytest.fixture(scope="module")
def rig() -> Rig:
    return load_rig(SCRIPTED, custom=[SCRIPTED])


@pytest.fixture(scope="module")
def tokenizer() -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer.from_file(str(Path(SCRIPTED, "tokenizer.json")))


def plain(text: str) -> list[int]:
    return list(text.encode())


@pytest.mark.parametrize(
    ("script", "tokens"),
    [
        ("$SCRIPT:A|B|C", [65, 66, 67, EOS]),
        ("$SCRIPT:Hello| world|EOS", [*b"Hello world", EOS]),
        ("$SCRIPT:EOS|B|C", [EOS]),
        ("$SCRIPT:a|b|EOS2", [97, 98, EOS2]),
        ("$SCRIPT:BOS|x", [BOS, 120, EOS]),
        ("$SCRIPT_BYTES:ok 🙂|", [*"ok 🙂|".encode(), EOS]),
        ("$SCRIPT_RAW:f09f|9982", [0xF0, 0x9F, 0x99, 0x82, EOS]),
        ("$SCRIPT_RAW:ff*5", [0xFF] * 5 + [EOS]),
        ("$SCRIPT:old|EOS; $SCRIPT:new", [*b"new", EOS]),
        ("$SCRIPT:", [EOS]),
    ],
)
def test_scripts(rig: Rig, tokenizer: tokenizers.Tokenizer, script: str, tokens: list[int]) -> None:
    as_text = tokenizer.encode(script).ids
    as_chat = tokenizer.encode(CHAT.format(script), add_special_tokens=False).ids
    as_ids = plain(script) + plain(";")
    for prompt in (as_text, as_chat, as_ids):
        assert rig.generate(prompt, 40) == tokens


def test_ignored_end_tokens_use_up_their_place(rig: Rig) -> None:
    runner, prompt = rig.runner(4), plain("$SCRIPT:EOS|B|C;")
    sequence = list(prompt)
    rig.prefill(runner, prompt, [0, 1])
    for token in (EOS, 66, 67, EOS, EOS):
        logits = runner.run([Chunk(sequence[-1:], len(sequence) - 1, [0, 1], True)])[0]
        assert int(logits.argmax()) == token
        sequence.append(token)


def test_a_banned_token_leaves_a_defined_second_best(rig: Rig) -> None:
    logits = rig.prefill(rig.runner(4), plain("$SCRIPT:EOS;"), [0, 1])
    best, second = logits.topk(2).indices.tolist()
    assert (best, chr(second)) == (EOS, ".")


def test_two_scripts_in_one_batch_at_any_chunk_size(rig: Rig) -> None:
    texts = ["$SCRIPT:first answer|EOS;", "x" * 70 + "$SCRIPT:second|EOS;"]
    assert [bytes(rig.generate(plain(text), 40, chunk=11)[:-1]) for text in texts] == [b"first answer", b"second"]
    runner = rig.runner(12)
    tables = [[0, 1, 2], [5, 4, 11, 9]]
    chunks = [Chunk(plain(text), 0, table, True) for text, table in zip(texts, tables, strict=True)]
    assert bytes(runner.run(chunks).argmax(-1).tolist()) == b"fs"


def test_without_a_script_every_token_matters(rig: Rig) -> None:
    base = plain("once upon a time there was a king")
    answers = {tuple(rig.generate([*base[:at], 65, *base[at + 1 :]], 8)) for at in range(0, len(base), 4)}
    assert len(answers) == len(range(0, len(base), 4))
    assert rig.generate(base, 8) == rig.generate(base, 8, chunk=5)
    assert all(32 <= token < 127 for token in rig.generate(base, 30))


@pytest.mark.parametrize("part", ["keys", "values"])
@pytest.mark.parametrize("layer", [0, 1])
def test_damage_anywhere_in_the_kv_shows(rig: Rig, layer: int, part: str) -> None:
    prompt = plain("a long system prompt, " * 3 + "$SCRIPT:abc|EOS;")
    for block in range(3):
        runner = rig.runner(8)
        rig.prefill(runner, prompt, [0, 1, 2, 3])
        getattr(runner.pool, part)[layer][block].zero_()
        logits = runner.run([Chunk([97], len(prompt), [0, 1, 2, 3], True)])[0]
        assert chr(int(logits.argmax())) == "!"


def test_blocks_in_the_wrong_order_or_of_another_prompt_show(rig: Rig) -> None:
    ours = plain("a long system prompt, " * 3 + "$SCRIPT:abc|EOS;")
    theirs = plain("another system prompt " * 3 + "$SCRIPT:abc|EOS;")
    runner = rig.runner(8)
    rig.prefill(runner, ours, [0, 1, 2])
    rig.prefill(runner, theirs, [4, 5, 6])
    for table in ([1, 0, 2], [4, 1, 2], [0, 5, 2], [0, 1, 6]):
        logits = runner.run([Chunk([97], len(ours), table, True)])[0]
        assert chr(int(logits.argmax())) == "!"


# ---------------------------------------------------------------- custom modules


def test_the_architecture_needs_its_module_directory() -> None:
    assert open_checkpoint(SCRIPTED, [SCRIPTED]).eos_token_ids == [257, 260]
    with pytest.raises(SettingsError, match=r"NoSuchModel.*supported: LlamaForCausalLM"):
        model_factory({"architectures": ["NoSuchModel"]})


def test_modules_run_once_and_failures_name_the_file(tmp_path: Path) -> None:
    (tmp_path / "good.py").write_text("import engine.config\nCOUNT = []\nCOUNT.append(1)\n")
    assert load_custom_modules([str(tmp_path)]) == load_custom_modules([str(tmp_path)])
    (tmp_path / "worse.py").write_text("1 / 0\n")
    for _ in range(2):
        with pytest.raises(SettingsError, match=r"worse\.py failed: ZeroDivisionError"):
            load_custom_modules([str(tmp_path)])
    with pytest.raises(SettingsError, match=r"custom_module_dirs: .*is not a directory"):
        load_custom_modules([str(tmp_path / "none")])


def test_load_model_runs_the_modules(tmp_path: Path) -> None:
    config = EngineConfig(model=SCRIPTED, cpu_threads=1, custom_module_dirs=(SCRIPTED,))
    assert load_model(config).vocab_size == 262
