"""Run functions in forked processes: a training starts in a second where a new interpreter would import for ten."""

import os
import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path

import torch
from torch.distributed import TCPStore
from tqdm import tqdm


def start(work: Callable[[], int], log: Path, **env: str) -> int:
    """Fork; the child runs ``work`` with its output in ``log`` and ends with its status. Returns the child's id."""
    assert torch.get_num_threads() == 1, "a forked process waits forever for OpenMP's other threads"
    child = os.fork()
    if child:
        return child
    status = 70
    renew_threads()
    try:
        file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(file, 1)
        os.dup2(file, 2)
        sys.stdout, sys.stderr = os.fdopen(1, "w", buffering=1), os.fdopen(2, "w", buffering=1)
        os.environ.update(env)
        tqdm.set_lock(threading.RLock())  # its own is shared among processes, and one that is killed may hold it
        status = work()
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def renew_threads() -> None:
    """Make torch's pool of threads anew, in a fork's first thread: two that do it at once find no pool in torch 2.13."""
    torch.set_num_threads(1)


def status_of(child: int) -> int:
    """Exit status of a child; minus the signal that ended it."""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def ranks(work: Callable[[], int], world: int, log: Path) -> list[int]:
    """Run ``work`` in ``world`` processes with the environment that torchrun gives, and return their statuses. As torchrun, this
    process has their store: nobody else has its port, and it outlives each of them."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    common = {
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world),
        "GROUP_RANK": "0", "TORCHELASTIC_RUN_ID": "test", "TORCHELASTIC_USE_AGENT_STORE": "True",
    }  # fmt: skip
    children = [start(work, log, RANK=str(rank), LOCAL_RANK=str(rank), **common) for rank in range(world)]
    return [status_of(child) for child in children]
