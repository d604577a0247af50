"""Prints a vLLM server's KV events as JSON, one batch a line: `python bench/vllm_events.py tcp://127.0.0.1:15557`.

To be run by an interpreter that has zmq and msgspec, as that of the vLLM environment does. Ends after `--seconds`.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from typing import Any


def main() -> int:
    import msgspec
    import zmq

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("endpoint")
    parser.add_argument("--seconds", type=float, default=60.0)
    arguments = parser.parse_args()
    socket = zmq.Context.instance().socket(zmq.SUB)
    socket.subscribe(b"")
    socket.connect(arguments.endpoint)
    deadline = time.monotonic() + arguments.seconds
    while (left := deadline - time.monotonic()) > 0:
        if socket.poll(left * 1000):
            topic, sequence, payload = socket.recv_multipart()
            batch = msgspec.msgpack.decode(payload)
            entry = {"topic": topic.decode(), "sequence": int.from_bytes(sequence, "big"), "batch": readable(batch)}
            print(json.dumps(entry), flush=True)
    return 0


def readable(value: Any) -> Any:
    """Bytes as hex, and lists of many numbers cut short."""
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, dict):
        return {name: readable(entry) for name, entry in value.items()}
    if isinstance(value, list):
        if len(value) > 8 and all(isinstance(entry, int) for entry in value):
            return [*value[:4], f"... {len(value)} in all"]
        return [readable(entry) for entry in value]
    return value


if __name__ == "__main__":
    sys.exit(main())
