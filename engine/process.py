"""The engine process: `python -m engine.process --fd N`, N being its end of a socket pair.

The first frame is the EngineConfig as JSON; everything after it is a message of `engine.messages`. Threads: the engine
loop (main), one receiver, two fetchers, one publisher. Signals of a terminal are the parent's to handle: the process
ends on Shutdown, and when the parent's end of the socket closes.
"""

from __future__ import annotations

import argparse
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

import msgspec

from engine.blocks import BlockPool
from engine.channel import Channel, FrameError
from engine.config import EngineConfig
from engine.loop import ChannelClosed, EngineLoop, InboxItem, Model, PoolStateChanged
from engine.messages import Fatal, FromEngine, Loading, Ready, Shutdown, ToEngine
from engine.sequence import ModelFacts
from engine.step import Chunk
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


class _Engine:
    """Everything that the process owns, made in the order of what can fail first; it is ready when this returns."""

    def __init__(self, config: EngineConfig, inbox: queue.SimpleQueue[InboxItem], send: Send) -> None:
        # torch is imported here, after the parent's first frame, so that a wrong command line ends at once.
        from engine.checkpoint import open_checkpoint
        from engine.kv_pool import KvPool
        from engine.runner import Runner, compute_dtype, load_model
        from engine.sampler import sample

        self.config = config
        self.incarnation = secrets.token_hex(8)
        self.checkpoint = open_checkpoint(config.model, config.custom_module_dirs)
        loaded = load_model(config, lambda stage, done: send([Loading(stage, done)]), self.checkpoint)
        send([Loading("cache", 0.0)])
        dtype = compute_dtype(config)
        shape = self.checkpoint.kv_shape
        sizes = (shape.num_layers, config.tokens_per_block, shape.num_kv_heads, shape.head_dim, dtype)
        self.block_bytes = KvPool.bytes_per_block(*sizes)
        self.num_blocks = _num_blocks(config, self.block_bytes)
        self.fingerprint = self._fingerprint(str(dtype).removeprefix("torch."))
        self.pages = SharedPool.create(self.num_blocks, self.block_bytes, self.incarnation)
        kv = KvPool(self.pages.blocks_buffer, self.num_blocks, *sizes)
        runner = Runner(config, self.checkpoint, kv, loaded)
        send([Loading("warm-up", 0.0)])
        runner.run([Chunk(tokens=[0], start=0, block_table=[0], wants_logits=True)])
        self.facts = self._facts()
        self.store = self._start_pool(inbox)
        model = Model(self.facts, runner, sample, kv.copy_block)
        blocks = BlockPool(self.num_blocks, config.enable_block_reuse, self.pages.bump)
        self.loop = EngineLoop(config, model, blocks, self.pages, self.store, self.incarnation, inbox, send)
        self._log_size()
        send([self._ready()])

    def close(self) -> None:
        self.loop.close()
        if self.store is not None:
            self.store.close()
        self.pages.close()

    def _fingerprint(self, kv_dtype: str) -> Fingerprint:
        from engine.kv_pool import LAYOUT

        shape = self.checkpoint.kv_shape
        return Fingerprint(
            model=self.checkpoint.weights_digest(),
            tokenizer=self.checkpoint.tokenizer_digest(),
            kv_dtype=kv_dtype,
            layout=LAYOUT,
            block_size=self.config.tokens_per_block,
            num_layers=shape.num_layers,
            num_kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            tp_size=1,
        )

    def _facts(self) -> ModelFacts:
        longest = self.checkpoint.max_seq_len
        return ModelFacts(
            fingerprint=self.fingerprint.digest(),
            vocab_size=self.checkpoint.vocab_size,
            max_seq_len=min(self.config.max_seq_len or longest, longest),
            eos_token_ids=frozenset(self.checkpoint.eos_token_ids),
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
        log.info(
            "KV pool: %d blocks of %d tokens, %d tokens, %.1f MiB (%d bytes a block); longest sequence %d tokens",
            self.num_blocks,
            self.config.tokens_per_block,
            self.num_blocks * self.config.tokens_per_block,
            self.num_blocks * self.block_bytes / 2**20,
            self.block_bytes,
            self.facts.max_seq_len,
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
            transfers=[path for path in self.config.transfers if path != "pool" or self.store is not None],
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
