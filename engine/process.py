"""The engine process: `python -m engine.process --fd N`, N being its end of a socket pair.

The first frame is the EngineConfig as JSON; everything after it is a message of `engine.messages`. Threads: the engine
loop (main), one receiver, two fetchers, one publisher. Signals of a terminal are the parent's to handle: the process
ends on Shutdown, and when the parent's end of the socket closes.
"""

from __future__ import annotations

import argparse
import functools
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
        _serve(config, inbox, send)
    except SettingsError as error:
        send([Fatal(str(error), error.problems)])
        return 2
    except Exception as error:
        log.exception("the engine ends")
        send([Fatal(f"{type(error).__name__}: {error}")])
        return 1
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


def _serve(config: EngineConfig, inbox: queue.SimpleQueue[InboxItem], send: Send) -> None:
    # torch is imported here, after the parent's first frame, so that a wrong command line ends at once.
    from engine.checkpoint import open_checkpoint
    from engine.kv_pool import LAYOUT, KvPool
    from engine.runner import Runner, compute_dtype, load_model
    from engine.sampler import sample

    incarnation = secrets.token_hex(8)
    checkpoint = open_checkpoint(config.model, config.custom_module_dirs)
    loaded = load_model(config, lambda stage, done: send([Loading(stage, done)]), checkpoint)
    dtype = compute_dtype(config)
    shape = checkpoint.kv_shape
    sizes = (shape.num_layers, config.tokens_per_block, shape.num_kv_heads, shape.head_dim, dtype)
    block_bytes = KvPool.bytes_per_block(*sizes)
    num_blocks = _num_blocks(config, block_bytes)
    fingerprint = Fingerprint(
        model=checkpoint.weights_digest(),
        tokenizer=checkpoint.tokenizer_digest(),
        kv_dtype=str(dtype).removeprefix("torch."),
        layout=LAYOUT,
        block_size=config.tokens_per_block,
        num_layers=shape.num_layers,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        tp_size=1,
    )
    send([Loading("cache", 0.0)])
    pages = SharedPool.create(num_blocks, block_bytes, incarnation)
    kv = KvPool(pages.blocks_buffer, num_blocks, *sizes)
    store = _start_pool(config, fingerprint.digest(), block_bytes, incarnation, inbox)
    facts = ModelFacts(
        fingerprint=fingerprint.digest(),
        vocab_size=checkpoint.vocab_size,
        max_seq_len=min(config.max_seq_len or checkpoint.max_seq_len, checkpoint.max_seq_len),
        eos_token_ids=frozenset(checkpoint.eos_token_ids),
    )
    model = Model(facts, Runner(config, checkpoint, kv, loaded), sample, kv.copy_block)
    blocks = BlockPool(num_blocks, config.enable_block_reuse, pages.bump)
    loop = EngineLoop(config, model, blocks, pages, store, incarnation, inbox, send)
    log.info(
        "KV pool: %d blocks of %d tokens, %d tokens, %.1f MiB (%d bytes a block); longest sequence %d tokens",
        num_blocks,
        config.tokens_per_block,
        num_blocks * config.tokens_per_block,
        num_blocks * block_bytes / 2**20,
        block_bytes,
        facts.max_seq_len,
    )
    ready = Ready(
        fingerprint=fingerprint,
        incarnation=incarnation,
        num_blocks=num_blocks,
        block_size=config.tokens_per_block,
        block_bytes=block_bytes,
        max_seq_len=facts.max_seq_len,
        vocab_size=facts.vocab_size,
        eos_token_ids=sorted(facts.eos_token_ids),
        transfers=[path for path in config.transfers if path != "pool" or store is not None],
    )
    send([ready])
    try:
        loop.run()
    finally:
        if store is not None:
            store.close()
        pages.close()


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


def _start_pool(
    config: EngineConfig, fingerprint: str, block_bytes: int, incarnation: str, inbox: queue.SimpleQueue[InboxItem]
) -> BlockStore | None:
    """The pool is a cache: the engine serves without waiting for it."""
    if config.pool is None:
        return None
    from mooncake_pool.remote import PoolClient, key_prefix

    prefix = key_prefix(config.pool.model_key or fingerprint, config.tokens_per_block, block_bytes, fingerprint)
    tell = functools.partial(_pool_state_changed, inbox)
    return PoolClient.start(config.pool, prefix, block_bytes, incarnation, tell)


def _pool_state_changed(inbox: queue.SimpleQueue[InboxItem], _state: str) -> None:
    inbox.put(PoolStateChanged())


if __name__ == "__main__":
    status = main()
    logging.shutdown()
    # Daemon threads may be inside a library's call; interpreter teardown under them crashes.
    os._exit(status)
