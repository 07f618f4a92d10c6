"""Child process that isolates the fuzzer from crashes."""

import mmap
import os
import signal
import struct
import sys
import traceback
from collections.abc import Callable

SEED = struct.Struct("q")


def guarded(work: Callable[[Callable[[int], None]], int], options: str = "") -> int:
    """Run ``work`` in a child process and return its status; after a crash, report the seed.

    ``work`` takes a function, which it calls with each seed before the seed runs.
    """
    shared = mmap.mmap(-1, SEED.size)
    child = os.fork()
    if not child:
        status = 2
        try:
            status = work(lambda seed: SEED.pack_into(shared, 0, seed))
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            os._exit(status)
    _, ended = os.waitpid(child, 0)
    if not os.WIFSIGNALED(ended):
        return os.waitstatus_to_exitcode(ended)
    (seed,), name = SEED.unpack_from(shared), signal.Signals(os.WTERMSIG(ended)).name
    print(f"python -m tests.fuzz --first {seed} --seeds 1{options}  # the process died of {name}; "
          "seeds after it did not run")  # fmt: skip
    return 1
