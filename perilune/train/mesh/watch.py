"""Who is alive: every process beats in the job's key-value store, watches its neighbour, and reads whom others miss.

A killed process leaves the others inside a collective, with nothing to say who is gone. Here the neighbour that misses
a rank names it in the store within `patience` seconds, everyone reads it one beat later, says it and ends, so that
torchrun can start the job again from its newest checkpoint. Each process costs three small requests a beat, however
many there are.
"""

import gc
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

T = TypeVar("T")
BEATS = 10  # in `patience`


class MeshError(RuntimeError):
    """The job cannot go on; the message is one sentence naming the rank."""


class Watch:
    """A thread beside the training of rank `rank` of `size`; store: a connection of its own."""

    def __init__(self, store: Any, rank: int, size: int, patience: float) -> None:
        self.store, self.rank, self.size, self.patience = store, rank, size, patience
        self.neighbour = (rank + 1) % size
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def start(self) -> None:
        self.store.set(f"host/{self.rank}", socket.gethostname())
        self.store.set(f"alive/{self.rank}", "0")
        self._thread.start()

    def stop(self) -> None:
        """This rank is done and will not be missed."""
        self.store.set(f"alive/{self.rank}", "done")
        self._end.set()
        self._thread.join()

    def accuse(self, sentence: str) -> None:
        """Tell everyone why the job ends; the first sentence stays."""
        self.store.compare_set("ended", "", sentence)

    def _run(self) -> None:
        beat, seen, since = 0, b"", time.monotonic()
        while not self._end.wait(self.patience / BEATS):
            try:
                beat += 1
                self.store.set(f"alive/{self.rank}", str(beat))
                sign = self.store.get(f"alive/{self.neighbour}")
                if sign != seen:
                    seen, since = sign, time.monotonic()
                elif sign != b"done" and time.monotonic() - since > self.patience:
                    host = self.store.get(f"host/{self.neighbour}").decode()
                    self.accuse(f"rank {self.neighbour} on {host} showed no sign of life for {self.patience:.0f} s")
                if self.store.check(["ended"]):
                    self._stop_process(self.store.get("ended").decode())
            except RuntimeError as error:  # torch's: the store is gone, and with it the rank or agent that kept it
                if not self._end.is_set():
                    self._stop_process(f"the job's store is gone ({error})")

    def _stop_process(self, sentence: str) -> None:
        """The main thread may hang in a collective that nobody will finish."""
        if not self._end.is_set():
            print(f"perilune: rank {self.rank} stops: {sentence}.", file=sys.stderr, flush=True)
            os._exit(3)


def by_torchrun() -> bool:
    """Whether torchrun (or something that sets its variables) started this process."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


@contextmanager
def processes(patience: float, device: torch.device) -> Iterator[int]:
    """The process group of torchrun's processes, watched; yields this one's rank.

    An error of this process is told to all before it is raised; one that torch raises because another process is gone
    waits for that one's name.
    """
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store, timeout = _store("job"), timedelta(minutes=30)
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout)
    watch = Watch(_store("watch"), rank, size, patience)
    watch.start()
    try:
        yield rank
    except (RuntimeError, dist.DistError) as error:
        if type(error) is RuntimeError or isinstance(error, dist.DistError):
            time.sleep(patience + 3 * patience / BEATS)  # the watch ends this process with the culprit's name
        watch.accuse(f"rank {rank} failed: {error}")
        raise
    except Exception as error:
        watch.accuse(f"rank {rank} failed: {error}")
        raise
    watch.stop()
    gc.collect()  # what still refers to a group would join its threads at exit, where they cannot end
    dist.barrier()
    dist.destroy_process_group()


def in_turn(part: Callable[[], T]) -> T:
    """What the first process makes before the others, which then find it made. One process just makes it."""
    if not dist.is_initialized():
        return part()
    store = _store("turn")
    if dist.get_rank() == 0:
        made = part()
        store.set("in turn", "made")
        return made
    store.wait(["in turn"], timedelta(days=2))  # preparing data can take longer than any collective waits
    return part()


def _store(what: str) -> Any:
    """A connection to torchrun's store, or to rank 0's where there is no agent, with names of this start of the job.

    torchrun keeps a store over restarts (static rendezvous), and with it the addresses of processes that are gone.
    """
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    host = os.environ["RANK"] == "0" and not agent
    store = dist.TCPStore(address, port, is_master=host, wait_for_workers=False, multi_tenant=True)
    return dist.PrefixStore(f"{what}/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
