"""Token for token what transformers' generate gives, however the prompt is cut, batched, shared or placed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
import transformers
from model_rig import TINY, Rig, load_rig

from engine.models.matrix import can_pack
from engine.step import Chunk

QUESTIONS = [
    "What is the capital of France?",
    "Count from 3 to 14.",
    "Repeat: apple river stone house tree blue green wolf seven cloud paper glass",
    "The code of ada is 31. The code of bob is 77. The code of eve is 52. What is the code of bob?",
    "Repeat: " + " ".join(["stone", "moon", "tree", "fish"] * 10),
    "x",
]


@pytest.fixture(scope="module")
def tiny() -> Rig:
    return load_rig(TINY)


@pytest.fixture(scope="module")
def reference() -> Any:
    torch.set_num_threads(1)
    return transformers.AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    tokenizer = tokenizers.Tokenizer.from_file(str(Path(TINY, "tokenizer.json")))
    chats = [f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n" for text in QUESTIONS]
    return [tokenizer.encode(chat).ids for chat in chats]


@pytest.fixture(scope="module")
def expected(reference: Any, prompts: list[list[int]]) -> list[list[int]]:
    return [hf_greedy(reference, prompt, 40) for prompt in prompts]


def hf_greedy(model: Any, prompt: list[int], count: int) -> list[int]:
    ids = torch.tensor([prompt])
    out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False)
    return [int(token) for token in out[0, len(prompt) :]]


def test_alone(tiny: Rig, prompts: list[list[int]], expected: list[list[int]]) -> None:
    assert [tiny.generate(prompt, 40) for prompt in prompts] == expected


@pytest.mark.parametrize("chunk", [1, 7, 32, 33])
def test_chunked_prefill(tiny: Rig, prompts: list[list[int]], expected: list[list[int]], chunk: int) -> None:
    assert [tiny.generate(prompt, 40, chunk) for prompt in prompts[2:5]] == expected[2:5]


@pytest.mark.parametrize("page", [1, 5, 16])
def test_page_size(prompts: list[list[int]], expected: list[list[int]], page: int) -> None:
    rig = load_rig(TINY, page)
    assert [rig.generate(prompt, 40, chunk=19) for prompt in prompts[:4]] == expected[:4]


def test_stale_pool_contents_have_no_effect(tiny: Rig, prompts: list[list[int]], expected: list[list[int]]) -> None:
    """Slots past a sequence's end may hold anything, NaN too, since a former owner's bytes are not erased at once."""
    assert [tiny.generate(prompt, 40, fill=float("nan")) for prompt in prompts] == expected


@pytest.mark.parametrize("length", [1, 31, 32, 33, 63, 64, 65])
def test_lengths_around_the_block(tiny: Rig, reference: Any, length: int) -> None:
    prompt = [(37 * position) % 900 + 3 for position in range(length)]
    assert tiny.generate(prompt, 36, fill=float("nan")) == hf_greedy(reference, prompt, 36)


def test_batched_with_mixed_chunks(tiny: Rig, prompts: list[list[int]], expected: list[list[int]]) -> None:
    """Requests join one step apart: every step mixes prefill chunks of 16 with decodes of the earlier ones."""
    runner = tiny.runner(128)
    tables = [list(range(10 * index, 10 * index + 10)) for index in range(len(prompts))]
    sequences = [list(prompt) for prompt in prompts]
    done = [0] * len(prompts)
    for step in range(200):
        chunks, owners = [], []
        for index, sequence in enumerate(sequences[: step + 1]):
            answer = sequence[len(prompts[index]) :]
            if len(answer) == 40 or (answer and answer[-1] in tiny.checkpoint.eos_token_ids):
                continue
            tokens = sequence[done[index] : done[index] + 16]
            ends = done[index] + len(tokens) == len(sequence)
            chunks.append(Chunk(tokens, done[index], tables[index], wants_logits=ends))
            done[index] += len(tokens)
            owners += [index] if ends else []
        if not chunks:
            break
        logits = runner.run(chunks)
        assert logits.shape == (len(owners), tiny.model.vocab_size)
        for index, token in zip(owners, logits.argmax(-1).tolist(), strict=True):
            sequences[index].append(token)
    assert [sequence[len(prompt) :] for sequence, prompt in zip(sequences, prompts, strict=True)] == expected


def test_a_row_does_not_depend_on_its_neighbours(tiny: Rig, prompts: list[list[int]]) -> None:
    runner = tiny.runner(64)
    tables = [list(range(8 * index, 8 * index + 8)) for index in range(len(prompts))]
    firsts = [int(tiny.prefill(runner, prompt, table).argmax()) for prompt, table in zip(prompts, tables, strict=True)]
    chunks = [
        Chunk([first], len(prompt), table, True) for first, prompt, table in zip(firsts, prompts, tables, strict=True)
    ]
    together = runner.run(chunks)
    alone = torch.cat([runner.run([chunk]) for chunk in chunks])
    assert torch.equal(together, alone) if can_pack(torch.float32) else torch.allclose(together, alone, atol=2e-4)


def test_a_prompt_does_not_depend_on_its_neighbours(tiny: Rig, prompts: list[list[int]]) -> None:
    """Nor on being cut at multiples of a segment."""
    long = [(37 * position) % 900 + 3 for position in range(150)]
    runner = tiny.runner(64)
    tables = [list(range(8 * index, 8 * index + 8)) for index in range(7)]
    whole = [Chunk(prompt, 0, table, True) for prompt, table in zip([*prompts, long], tables, strict=True)]
    together = runner.run(whole)
    alone = torch.cat([runner.run([chunk]) for chunk in whole])
    cut = tiny.prefill(runner, long, tables[6], chunk=64)
    if can_pack(torch.float32):
        assert torch.equal(together, alone) and torch.equal(cut, alone[6])
    torch.testing.assert_close(together, alone, rtol=0, atol=2e-4)


def test_shared_prefix_blocks(tiny: Rig, prompts: list[list[int]], expected: list[list[int]]) -> None:
    """A second table that names the first one's full blocks needs only the rest computed."""
    prompt, answer = prompts[4], expected[4]
    runner = tiny.runner(32)
    tiny.prefill(runner, prompt, [3, 9, 4, 1, 7])
    shared = (len(prompt) - 1) // 32
    table = [3, 9, 4, 1, 7][:shared] + [20, 21, 22, 23][: 6 - shared]
    first = int(tiny.prefill(runner, prompt, table, start=32 * shared).argmax())
    assert tiny.decode(runner, first, len(prompt), table, 40) == answer


def test_copy_on_write_of_a_partial_block(tiny: Rig, prompts: list[list[int]], expected: list[list[int]]) -> None:
    """Two choices share a prompt; each goes on in its own copy of the prompt's last block."""
    prompt, answer = prompts[2], expected[2]
    assert len(prompt) % 32
    runner = tiny.runner(16)
    full = len(prompt) // 32
    table = list(range(4))
    first = int(tiny.prefill(runner, prompt, table).argmax())
    runner.pool.copy_block(full, 10)
    other = [*table[:full], 10, 11, 12]
    spoiled = tiny.decode(runner, (first + 1) % 1000, len(prompt), [*table[:full], full, 13, 14], 8)
    assert spoiled[0] != first
    assert tiny.decode(runner, first, len(prompt), other, 40) == answer


def test_moved_to_another_pool(tiny: Rig, prompts: list[list[int]], expected: list[list[int]]) -> None:
    """A hand-off: whole blocks copied into other places of another pool, and the source spoiled."""
    source, target = tiny.runner(16), tiny.runner(16, fill=float("nan"))
    prompt = prompts[3]
    used = tiny.blocks_for(len(prompt))
    first = int(tiny.prefill(source, prompt, list(range(used))).argmax())
    table = list(range(15, 15 - tiny.blocks_for(len(prompt) + 40), -1))
    for block in range(used):
        target.pool.blocks[table[block]] = source.pool.blocks[block]
    source.pool.blocks.fill_(float("nan"))
    assert tiny.decode(target, first, len(prompt), table, 40) == expected[3]
