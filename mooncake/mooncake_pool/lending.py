"""The memory that a rank lends to the pool, and how the store clients of its host come to map it.

    agent: memfd ── mounted as the pool's segment ── Lender, an abstract socket for each port of this process
    engines of the host ── connect to the port that a block's descriptor names ── memfd, base address

Abstract sockets live in the network namespace, as do the ports: who cannot reach the port does not find the socket.
A connection stays open for as long as the lender lives, so that its end is known at once.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import socket
import struct
import threading

from mooncake_pool.net import own_listening_ports

OFFER = struct.Struct("<8sQQ")
"""magic, address of the segment in its holder's process, its size in bytes."""
MAGIC = b"TDKVSEG1"
_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE, Linux 5.14
_STEP = 16 * 1024 * 1024
_NICE = 10


class LentMemory:
    """A memfd of `size` bytes; `base` is where the vendor's client has mapped it."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.base = 0
        self.fd = os.memfd_create("mooncake-segment", os.MFD_CLOEXEC)
        os.ftruncate(self.fd, size)

    @property
    def path(self) -> str:
        return f"/proc/self/fd/{self.fd}"

    def find_mapping(self) -> None:
        """Sets `base`. OSError when nothing has mapped the memory."""
        inode = str(os.fstat(self.fd).st_ino)
        with open("/proc/self/maps") as maps:
            for line in maps:
                fields = line.split()
                if fields[4] == inode and "mooncake-segment" in line:
                    self.base = int(fields[0].partition("-")[0], 16)
                    return
        raise OSError("the store client has not mapped the segment that it was given")


def lender_name(port: int) -> str:
    return f"\0mooncake-pool/lender/{port}"


class Lender:
    """Hands the memory's descriptor to processes of the same user. Threads end with `close`."""

    def __init__(self, memory: LentMemory) -> None:
        self._memory = memory
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._peers: list[socket.socket] = []
        self._listeners: list[socket.socket] = []
        self.ports: list[int] = own_listening_ports()
        for port in self.ports:
            listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                listener.bind(lender_name(port))
            except OSError:  # a lender on another address of this host has the same port
                listener.close()
                continue
            listener.listen()
            self._listeners.append(listener)
        self._threads = [
            threading.Thread(target=self._serve, args=(listener,), name="lender", daemon=True)
            for listener in self._listeners
        ]
        self._threads.append(threading.Thread(target=self._commit, name="commit", daemon=True))
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        self._stop.set()
        for listener in self._listeners:
            with contextlib.suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)  # wakes accept
        for thread in self._threads:
            thread.join(1.0)
        for sock in (*self._listeners, *self._peers):
            sock.close()

    def _serve(self, listener: socket.socket) -> None:
        offer = OFFER.pack(MAGIC, self._memory.base, self._memory.size)
        while not self._stop.is_set():
            try:
                peer, _ = listener.accept()
            except OSError:
                return
            if _user_of(peer) != os.getuid():
                peer.close()
                continue
            with self._lock, contextlib.suppress(OSError):
                self._peers = [old for old in self._peers if _is_open(old)]
                socket.send_fds(peer, [offer], [self._memory.fd])
                peer.setblocking(False)
                self._peers.append(peer)

    def _commit(self) -> None:
        populate(self._memory.base, self._memory.size, self._stop)


def _is_open(peer: socket.socket) -> bool:
    """False, and the socket closed, when the other side has closed it."""
    try:
        if peer.recv(1):
            return True
    except BlockingIOError:
        return True
    except OSError:
        pass
    peer.close()
    return False


def _user_of(peer: socket.socket) -> int:
    credentials = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    return int(struct.unpack("iII", credentials)[1])


def populate(address: int, size: int, stop: threading.Event) -> None:
    """Has the pages there and mapped before anybody waits for them, at low priority; a first touch costs 0.25 us/KiB.

    Does nothing where the kernel cannot.
    """
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
    libc = ctypes.CDLL(None)
    for start in range(0, size, _STEP):
        length = min(_STEP, size - start)
        if stop.is_set() or libc.madvise(ctypes.c_void_p(address + start), ctypes.c_size_t(length), _POPULATE_WRITE):
            return


def address_of(memory: mmap.mmap) -> int:
    """Keeps the mapping alive only while the ctypes object would; callers hold `memory` themselves."""
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))
