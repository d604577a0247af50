"""Run a command that cannot outlive the process that started it, however that one ends.

`guarded(argv)` is an argument vector whose process asks the kernel to be killed with its parent (Linux:
PR_SET_PDEATHSIG) and then becomes `argv` under the same pid. The kernel watches the parent *thread*: start such a child
from a thread that lives as long as the child should. On other systems the command runs unguarded.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

_PR_SET_PDEATHSIG = 1
_SIGKILL = 9


def guarded(argv: Sequence[str], signal: int = _SIGKILL) -> list[str]:
    """`argv` behind this module: about 20 ms more at start, no process more afterwards."""
    # By file and without site: the wrapper must not depend on how the project is installed, and starts faster.
    return [sys.executable, "-I", "-S", os.path.abspath(__file__), str(os.getpid()), str(signal), *argv]


def _main(args: list[str]) -> None:
    parent, signal, argv = int(args[0]), int(args[1]), args[2:]
    if sys.platform == "linux":
        import ctypes

        if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal, 0, 0, 0) != 0:
            sys.exit(f"child_guard: prctl failed with errno {ctypes.get_errno()}")
    if os.getppid() != parent:  # it died before the request reached the kernel
        sys.exit("child_guard: the starting process is gone")
    try:
        os.execvp(argv[0], argv)
    except OSError as error:
        sys.exit(f"child_guard: cannot run {argv[0]}: {error.strerror}")


if __name__ == "__main__":
    _main(sys.argv[1:])
