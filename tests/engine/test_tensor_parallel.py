"""A model shared by ranks: the same tokens as in one piece, one pool for all, and the end of a rank."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from model_families_rig import save_random
from model_rig import TINY, make_pool

from engine.checkpoint import open_checkpoint
from engine.client import EngineClient
from engine.config import EngineConfig
from engine.kv_pool import KvPool
from engine.messages import SamplingParams, Submit
from engine.models.llama_shape import LlamaShape
from engine.models.registry import Model
from engine.parallel import Part
from engine.runner import Runner, load_model
from engine.step import Chunk
from kvstore.errors import InternalError, SettingsError

PROMPTS = [[(7 * at + 3 * index) % 900 + 3 for at in range(20 + 11 * index)] for index in range(5)]


def config(**more: Any) -> EngineConfig:
    settings = {"model": TINY, "cpu_threads": 1, "max_tokens": 4096, "max_num_tokens": 48, "max_batch_size": 8}
    return EngineConfig(**(settings | more))


async def answers(client: EngineClient, **sampling: Any) -> list[tuple[list[int], list[Any]]]:
    params = SamplingParams(**({"max_tokens": 24, "ignore_eos": True, "seed": 11} | sampling))
    streams = [client.submit(Submit(f"r{index}", prompt, params)) for index, prompt in enumerate(PROMPTS)]
    found = []
    for stream in streams:
        outputs = [output async for output in stream]
        tokens = [token for output in outputs for token in output.token_ids]
        found.append((tokens, [each for output in outputs for each in (output.logprobs or [])]))
    return found


@pytest.mark.cluster
@pytest.mark.timeout(120)
async def test_two_ranks_give_the_tokens_of_one() -> None:
    """Greedy, and drawn with penalties and two choices; chunked prefill, shared prefixes, a copied last block."""
    drawn = {"temperature": 0.9, "top_p": 0.95, "n": 2, "max_tokens": 12}
    found = {}
    for ranks in (1, 2):
        client = await EngineClient.start(config(tp_size=ranks))
        try:
            greedy = await answers(client, temperature=0.0)
            again = await answers(client, temperature=0.0)  # from the prefix cache
            found[ranks] = [greedy, again, await answers(client, **drawn)]
            assert client.ready.fingerprint.tp_size == ranks
        finally:
            await client.close()
    assert [tokens for tokens, _ in found[1][0]] == [tokens for tokens, _ in found[1][1]]
    for one, two in zip(found[1], found[2], strict=True):
        assert [tokens for tokens, _ in one] == [tokens for tokens, _ in two]


@pytest.mark.cluster
@pytest.mark.timeout(120)
async def test_a_dead_rank_ends_the_engine_and_none_is_left() -> None:
    client = await EngineClient.start(config(tp_size=2))
    try:
        (rank,) = psutil.Process(client.pid).children()
        stream = client.submit(Submit("r", PROMPTS[0], SamplingParams(max_tokens=1000, ignore_eos=True)))
        await anext(stream)
        os.kill(rank.pid, signal.SIGKILL)
        with pytest.raises(InternalError, match="engine process has ended"):
            async for _ in stream:
                pass
        await asyncio.wait_for(client.wait_dead(), 20)
    finally:
        await client.close()


@pytest.mark.cluster
@pytest.mark.timeout(120)
async def test_ranks_end_with_a_killed_engine() -> None:
    client = await EngineClient.start(config(tp_size=2))
    (rank,) = psutil.Process(client.pid).children()
    os.kill(client.pid, signal.SIGKILL)
    await asyncio.to_thread(psutil.wait_procs, [rank], timeout=20)
    assert not rank.is_running() or rank.status() == psutil.STATUS_ZOMBIE
    await client.close()


@pytest.mark.cluster
@pytest.mark.timeout(120)
@pytest.mark.parametrize("shape", [{"cpu_threads": 2}, {"tp_size": 2}])
async def test_an_idle_engine_uses_no_cpu(shape: dict[str, int]) -> None:
    """Neither the loop, nor the threads of the matrix products, nor a rank that waits for its next step."""
    client = await EngineClient.start(config(**shape))
    try:
        await answers(client, temperature=0.0)
        engine = psutil.Process(client.pid)
        processes = [engine, *engine.children()]

        def used() -> float:
            return sum(times.user + times.system for times in (process.cpu_times() for process in processes))

        before = used()
        await asyncio.sleep(3)
        assert used() - before <= 0.03
    finally:
        await client.close()


@pytest.mark.cluster
async def test_sizes_that_do_not_divide_are_refused() -> None:
    with pytest.raises(SettingsError, match="tp_size: 3 does not divide num_key_value_heads, which is 2"):
        await EngineClient.start(config(tp_size=3))


# ---------------------------------------------------------------- in one process


class Both:
    """A group of ranks that a test steps by hand: collectives meet over barriers of threads."""

    def __init__(self, rank: int, shared: Meeting) -> None:
        self.part = Part(rank, shared.ranks)
        self._shared = shared

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack(self._shared.exchange(self.part.rank, x)).sum(0)

    def join(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat(self._shared.exchange(self.part.rank, x), dim=1)

    def wait(self) -> None:
        self._shared.exchange(self.part.rank, torch.zeros(1))


class Meeting:
    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        self._slots: list[torch.Tensor] = [torch.empty(0)] * ranks
        self._barrier = threading.Barrier(ranks, timeout=20)

    def exchange(self, rank: int, x: torch.Tensor) -> list[torch.Tensor]:
        self._slots[rank] = x
        self._barrier.wait()
        found = list(self._slots)
        self._barrier.wait()
        return found


FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-biases": ("LlamaConfig", {"attention_bias": True, "mlp_bias": True}),
    "odd-vocabulary": ("LlamaConfig", {"vocab_size": 101, "tie_word_embeddings": True}),
    "even-vocabulary": ("LlamaConfig", {"vocab_size": 96, "tie_word_embeddings": True}),
    "qwen3": ("Qwen3Config", {"head_dim": 16, "use_sliding_window": False}),
    "phi3": ("Phi3Config", {"pad_token_id": 0, "sliding_window": None}),
    "mixtral": ("MixtralConfig", {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None}),
}


@pytest.mark.parametrize("weight_dtype", ["auto", "int8"])
@pytest.mark.parametrize("family", FAMILIES)
def test_parts_of_each_family_add_up(tmp_path: Path, family: str, weight_dtype: str) -> None:
    """Logits of two ranks on one pool, against the model in one piece."""
    save_random(tmp_path, *FAMILIES[family])
    checkpoint = open_checkpoint(str(tmp_path))
    settings = EngineConfig(model=str(tmp_path), cpu_threads=1, tp_size=2, weight_dtype=weight_dtype)
    meeting = Meeting(2)
    groups = [Both(rank, meeting) for rank in range(2)]
    models: list[Model] = [load_model(settings, checkpoint=checkpoint, group=group) for group in groups]
    whole = make_pool(checkpoint, 8, page=8, fill=float("nan"))
    shape = checkpoint.kv_shape
    sizes = (shape.num_layers, 8, shape.num_kv_heads, shape.head_dim, torch.float32)
    memory = bytearray(8 * KvPool.bytes_per_block(*sizes))
    pools = [KvPool(memory, 8, *sizes, group.part) for group in groups]
    runners = [
        Runner(settings, checkpoint, pool, model, group)
        for pool, model, group in zip(pools, models, groups, strict=True)
    ]
    alone = Runner(settings, checkpoint, whole, load_model(settings, checkpoint=checkpoint))
    ids = list(range(5, 25))
    steps = [[Chunk(ids[:9], 0, [5, 1, 3], False)], [Chunk(ids[9:], 9, [5, 1, 3], True), Chunk([7], 0, [2], True)]]
    with ThreadPoolExecutor(2) as threads:
        for step in steps:
            expected = alone.run(step)
            found, _ = list(threads.map(Runner.compute, runners, [step, step]))
    off = float((found - expected).norm() / expected.norm())
    assert off < (1e-5 if weight_dtype == "auto" else 0.15)


def test_a_block_of_all_ranks_is_one_run_of_bytes() -> None:
    sizes = (3, 4, 2, 8, torch.float32)
    memory = bytearray(5 * KvPool.bytes_per_block(*sizes))
    pools = [KvPool(memory, 5, *sizes, Part(rank, 2)) for rank in range(2)]
    keys = torch.arange(2 * 2 * 8, dtype=torch.float32).view(2, 2, 8) + 1
    for rank, pool in enumerate(pools):
        pool.write(1, torch.tensor([4 * 3, 4 * 3 + 1]), keys[:, rank : rank + 1], -keys[:, rank : rank + 1])
    block = torch.frombuffer(memory, dtype=torch.float32).view(5, -1)
    assert block[3].any() and not block[[0, 1, 2, 4]].any()
    pools[0].copy_block(3, 0)
    assert torch.equal(pools[1].blocks[0], pools[1].blocks[3])
    pools[0].clear_tails([(3, 1)])
    assert pools[1].keys[1][3, 0].any() and not pools[1].keys[1][3, 1:].any()


def test_uneven_parts_name_every_size() -> None:
    shape = LlamaShape.of(open_checkpoint(TINY).config)
    with pytest.raises(SettingsError) as caught:
        shape.part(5)
    assert "num_attention_heads, which is 6" in str(caught.value)
    assert "num_key_value_heads, which is 2" in str(caught.value)
    assert shape.part(2).kv_heads == 1


def test_models_of_transformers_are_not_divided(tmp_path: Path) -> None:
    save_random(tmp_path, "GPTNeoXConfig", {"num_key_value_heads": 6, "pad_token_id": 0})
    with pytest.raises(SettingsError, match="tp_size"):
        load_model(config(model=str(tmp_path)), group=Both(0, Meeting(2)))
