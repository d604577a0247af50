"""The engine process: `python -m engine.process --fd N`, N being its end of a socket pair.

The first frame is the EngineConfig as JSON; everything after it is a message of `engine.messages`. Threads: the engine
loop (main), one receiver, two fetchers, one publisher. Signals of a terminal are the parent's to handle: the process
ends on Shutdown, and when the parent's end of the socket closes.
"""

from __future__ import annotations

import argparse
import dataclasses
import logging
import os
import queue
import secrets
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import msgspec

from engine.blocks import BlockPool
from engine.cache_events import HASH_ALGO
from engine.channel import Channel, FrameError
from engine.config import EngineConfig
from engine.guided import GuideCompiler, backend_named
from engine.host_tier import host_buffer
from engine.kv_capacity import KvCapacity
from engine.loop import ChannelClosed, EngineLoop, InboxItem, PoolStateChanged
from engine.messages import Fatal, FromEngine, Loading, Ready, Shutdown, ToEngine
from engine.model_port import Model
from engine.ranks import Ranks
from engine.sequence import ModelFacts
from engine.step import Chunk
from engine.vocabulary import read_vocabulary
from engine.ways import needs_shared_pages, open_ways
from kvstore.errors import SettingsError
from kvstore.protocol import Fingerprint
from kvstore.transceivers.base import BlockStore
from kvstore.transceivers.shm import SharedPool

log = logging.getLogger("engine")

_ORPHAN_GRACE = 10.0  # seconds for an orderly end after the parent is gone

Send = Callable[[list[FromEngine]], None]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m engine.process", description="Started by engine.client.")
    parser.add_argument("--fd", type=int, required=True, help="inherited end of a socket pair")
    connection = socket.socket(fileno=parser.parse_args().fd)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    channel = Channel(connection)
    first = channel.receive()
    if first is None:
        return 0
    config = msgspec.json.decode(first, type=EngineConfig)
    logging.basicConfig(
        level=config.log_level.upper(), stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    inbox: queue.SimpleQueue[InboxItem] = queue.SimpleQueue()
    threading.Thread(target=_receive, args=(channel, inbox), name="receive", daemon=True).start()
    encode = msgspec.msgpack.Encoder().encode

    def send(messages: list[FromEngine]) -> None:
        channel.send([encode(message) for message in messages])

    try:
        engine = _Engine(config, inbox, send)
    except SettingsError as error:
        send([Fatal(str(error), error.problems)])
        return 2
    except Exception as error:
        log.exception("the engine does not start")
        send([Fatal(f"{type(error).__name__}: {error}")])
        return 1
    try:
        engine.loop.run()
    except Exception as error:
        log.exception("the engine ends")
        send([Fatal(f"{type(error).__name__}: {error}")])
        return 1
    finally:
        engine.close()
    return 0


def _receive(channel: Channel, inbox: queue.SimpleQueue[InboxItem]) -> None:
    decoder: msgspec.msgpack.Decoder[ToEngine] = msgspec.msgpack.Decoder(ToEngine)
    try:
        while (payload := channel.receive()) is not None:
            message = decoder.decode(payload)
            inbox.put(message)
            if isinstance(message, Shutdown):
                return
    except (FrameError, msgspec.MsgspecError):
        log.exception("the channel from the parent is broken")
    inbox.put(ChannelClosed())
    # The loop may be inside a long step, or start-up inside a library: nobody is left to wait for either.
    time.sleep(_ORPHAN_GRACE)
    os._exit(1)


@dataclasses.dataclass(frozen=True, slots=True)
class _Parts:
    """What the loop needs of the device that computes."""

    runner: Any
    sample: Any
    copy_block: Callable[[int, int], None]
    gpu_memory: Callable[[], int]


class _Engine:
    """Everything that the process owns, made in the order of what can fail first; it is ready when this returns."""

    def __init__(self, config: EngineConfig, inbox: queue.SimpleQueue[InboxItem], send: Send) -> None:
        # torch is imported here, after the parent's first frame, so that a wrong command line ends at once.
        from engine.checkpoint import open_checkpoint
        from engine.device import on_device, runs_on_cuda

        if runs_on_cuda(config):
            config = on_device(config)
        self.config = config
        self.incarnation = secrets.token_hex(8)
        self.checkpoint = open_checkpoint(config.model, config.custom_module_dirs)
        self.ranks: Ranks | None = None
        parts = self._open_cuda(send) if runs_on_cuda(config) else self._open_cpu(send)
        self.facts = self._facts()
        self.store = self._start_pool(inbox)
        self.ways = open_ways(config, self.pages, self.incarnation)
        model = Model(
            self.facts, parts.runner, parts.sample, parts.copy_block, self._guides(), gpu_memory=parts.gpu_memory
        )
        self.host = host_buffer(config.host_cache_size, self.block_bytes, self.pages.block)
        blocks = BlockPool(self.num_blocks, config.enable_block_reuse, self.pages.bump, self.host)
        self.loop = EngineLoop(
            config,
            model,
            blocks,
            self.pages,
            self.store,
            self.incarnation,
            inbox,
            send,
            transceivers=self.ways.transceivers,
        )
        self._log_size()
        send([self._ready()])

    def _open_cpu(self, send: Send) -> _Parts:
        from engine.kv_pool import KvPool
        from engine.parallel import Alone
        from engine.runner import Runner, compute_dtype, load_model, weights_identity
        from engine.sampler import sample

        config = self.config
        self.ranks = Ranks(config) if config.tp_size > 1 else None
        group = self.ranks.group if self.ranks is not None else Alone()
        loaded = load_model(config, lambda stage, done: send([Loading(stage, done)]), self.checkpoint, group)
        send([Loading("cache", 0.0)])
        dtype = compute_dtype(config)
        shape = self.checkpoint.kv_shape
        sizes = (shape.num_layers, config.tokens_per_block, shape.num_kv_heads, shape.head_dim, dtype)
        self.block_bytes = KvPool.bytes_per_block(*sizes)
        self.num_blocks = _num_blocks(config, self.block_bytes)
        self.fingerprint = self._fingerprint(weights_identity(config, self.checkpoint), dtype)
        self.pages = SharedPool.create(
            self.num_blocks,
            self.block_bytes,
            self.incarnation,
            shared=self.ranks is not None or needs_shared_pages(config),
        )
        kv = KvPool(self.pages.blocks_buffer, self.num_blocks, *sizes, group.part)
        if self.ranks is not None:
            self.ranks.wait_ready()
            self.ranks.share_pool(self.pages)
        runner = Runner(config, self.checkpoint, kv, loaded, group, self.ranks)
        send([Loading("warm-up", 0.0)])
        runner.run([Chunk(tokens=[0], start=0, block_table=[0], wants_logits=True)])
        return _Parts(runner, sample, kv.copy_block, lambda: 0)

    def _open_cuda(self, send: Send) -> _Parts:
        from engine.cuda import memory_in_use, open_cuda
        from engine.runner import weights_identity

        cuda = open_cuda(self.config, self.checkpoint, lambda stage, done: send([Loading(stage, done)]))
        self.block_bytes, self.num_blocks = cuda.block_bytes, cuda.num_blocks
        self.fingerprint = self._fingerprint(weights_identity(self.config, self.checkpoint), cuda.dtype)
        # Blocks are in device memory: of these pages the block numbers' generations are used, and nothing else.
        self.pages = SharedPool.create(self.num_blocks, self.block_bytes, self.incarnation)
        return _Parts(cuda.runner, cuda.runner.sample, cuda.runner.copy_block, memory_in_use)

    def close(self) -> None:
        self.loop.close()
        if self.store is not None:
            self.store.close()
        if self.ranks is not None:
            self.ranks.close()
        self.pages.close()

    def _fingerprint(self, weights: str, dtype: object) -> Fingerprint:
        from engine.kv_pool import LAYOUT

        shape = self.checkpoint.kv_shape
        return Fingerprint(
            model=weights,
            tokenizer=self.checkpoint.tokenizer_digest(),
            kv_dtype=str(dtype).removeprefix("torch."),
            layout=LAYOUT,
            block_size=self.config.tokens_per_block,
            num_layers=shape.num_layers,
            num_kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            tp_size=self.config.tp_size,
        )

    def _facts(self) -> ModelFacts:
        longest = self.checkpoint.max_seq_len
        return ModelFacts(
            fingerprint=self.fingerprint.digest(),
            vocab_size=self.checkpoint.vocab_size,
            max_seq_len=min(self.config.max_seq_len or longest, longest),
            eos_token_ids=frozenset(self.checkpoint.eos_token_ids),
            identity=self.fingerprint,
        )

    def _guides(self) -> GuideCompiler | None:
        name = self.config.guided_decoding_backend
        if name == "none":
            return None
        source, facts = self.config.tokenizer or self.config.model, self.facts
        return GuideCompiler(
            lambda: backend_named(name, read_vocabulary(source, facts.vocab_size, facts.eos_token_ids))
        )

    def _start_pool(self, inbox: queue.SimpleQueue[InboxItem]) -> BlockStore | None:
        """The pool is a cache: the engine serves without waiting for it."""
        pool = self.config.pool
        if pool is None:
            return None
        from mooncake_pool.remote import PoolClient, key_prefix

        digest = self.fingerprint.digest()
        prefix = key_prefix(pool.model_key or digest, self.config.tokens_per_block, self.block_bytes, digest)
        return PoolClient.start(
            pool, prefix, self.block_bytes, self.incarnation, lambda _state: inbox.put(PoolStateChanged())
        )

    def _log_size(self) -> None:
        pool = KvCapacity(self.num_blocks, self.config.tokens_per_block, self.block_bytes)
        log.info("KV pool: %s; longest sequence %d tokens", pool, self.facts.max_seq_len)
        if self.host is not None:
            log.info(
                "KV host memory: %s",
                KvCapacity(self.host.num_blocks, self.config.tokens_per_block, self.block_bytes),
            )

    def _ready(self) -> Ready:
        return Ready(
            fingerprint=self.fingerprint,
            incarnation=self.incarnation,
            num_blocks=self.num_blocks,
            block_size=self.config.tokens_per_block,
            block_bytes=self.block_bytes,
            max_seq_len=self.facts.max_seq_len,
            vocab_size=self.facts.vocab_size,
            eos_token_ids=sorted(self.facts.eos_token_ids),
            transfers=[
                path
                for path in self.config.transfers
                if path in self.ways.transceivers or (path == "pool" and self.store is not None)
            ],
            transfer_choice=self.ways.choice,
            kv_cache_hash_algo=HASH_ALGO if self.config.event_buffer_max_size else None,
        )


def _num_blocks(config: EngineConfig, block_bytes: int) -> int:
    if config.num_blocks is not None:
        count = config.num_blocks
    elif config.max_tokens is not None:
        count = -(-config.max_tokens // config.tokens_per_block)
    else:
        count = config.host_kv_bytes // block_bytes
    if count < 1:
        raise SettingsError([("kv_cache_config", f"{count} KV blocks; a block has {block_bytes} bytes")])
    return count


if __name__ == "__main__":
    status = main()
    logging.shutdown()
    # Daemon threads may be inside a library's call; interpreter teardown under them crashes.
    os._exit(status)
