"""A rank beside rank 0 of a tensor-parallel engine: `python -m engine.rank --fd N`, started by engine.ranks.

It does what it is told over its end of a socket pair: load its part of the model, map the KV pool, compute steps. It
ends when the other end closes, at whatever point it is.
"""

from __future__ import annotations

import argparse
import logging
import mmap
import os
import queue
import signal
import socket
import sys
import threading

import msgspec

from engine.channel import Channel
from engine.config import EngineConfig
from engine.ranks import PoolAt, RankFailed, RankReady, RankStart, Steps, ToRank
from engine.step import Chunk
from kvstore.errors import SettingsError

log = logging.getLogger("engine")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m engine.rank", description="Started by engine.ranks.")
    parser.add_argument("--fd", type=int, required=True, help="inherited end of a socket pair")
    channel = Channel(socket.socket(fileno=parser.parse_args().fd))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    first = channel.receive()
    if first is None:
        return 0
    start = msgspec.msgpack.decode(first, type=RankStart)
    logging.basicConfig(
        level=start.config.log_level.upper(),
        stream=sys.stderr,
        format=f"%(asctime)s %(levelname)s %(name)s: rank {start.rank}: %(message)s",
    )
    inbox: queue.SimpleQueue[ToRank] = queue.SimpleQueue()
    threading.Thread(target=_receive, args=(channel, inbox), name="receive", daemon=True).start()
    try:
        _serve(start, channel, inbox)
    except SettingsError as error:
        channel.send([msgspec.msgpack.encode(RankFailed(str(error), error.problems))])
    except Exception as error:
        log.exception("the rank ends")
        channel.send([msgspec.msgpack.encode(RankFailed(f"{type(error).__name__}: {error}"))])
    return 1


def _receive(channel: Channel, inbox: queue.SimpleQueue[ToRank]) -> None:
    decoder: msgspec.msgpack.Decoder[ToRank] = msgspec.msgpack.Decoder(ToRank)
    while (payload := channel.receive()) is not None:
        inbox.put(decoder.decode(payload))
    # Rank 0 is gone or has finished. The main thread may be inside a collective that nobody will answer.
    os._exit(0)


def _serve(start: RankStart, channel: Channel, inbox: queue.SimpleQueue[ToRank]) -> None:
    from engine.checkpoint import open_checkpoint
    from engine.gloo import GlooGroup
    from engine.kv_pool import KvPool
    from engine.parallel import Part
    from engine.runner import Runner, compute_dtype, load_model

    config: EngineConfig = start.config
    group = GlooGroup(Part(start.rank, config.tp_size), start.store)
    checkpoint = open_checkpoint(config.model, config.custom_module_dirs)
    model = load_model(config, checkpoint=checkpoint, group=group)
    channel.send([msgspec.msgpack.encode(RankReady())])
    runner: Runner | None = None
    while True:
        match inbox.get():
            case PoolAt(path, offset, num_blocks):
                shape = checkpoint.kv_shape
                sizes = (shape.num_layers, config.tokens_per_block, shape.num_kv_heads, shape.head_dim)
                pool = KvPool(_mapped(path, offset), num_blocks, *sizes, compute_dtype(config), group.part)
                runner = Runner(config, checkpoint, pool, model, group)
            case Steps(chunks):
                if runner is None:
                    raise RuntimeError("a step came before the pool")
                runner.compute([Chunk(*fields) for fields in chunks])


def _mapped(path: str, offset: int) -> memoryview:
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        return memoryview(mmap.mmap(fd, 0))[offset:]
    finally:
        os.close(fd)


if __name__ == "__main__":
    status = main()
    logging.shutdown()
    os._exit(status)
