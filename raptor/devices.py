"""Devices, precision and processes: where things run.

Several processes ("ranks") share one command's images. The rule is the same everywhere: each rank measures its share of
the batches, every accumulator has a `reduce(ranks)`, after which rank 0 holds what one process would hold, and
`ranks.first` finishes on rank 0 and sends the result to all. A process by itself is `ONE_PROCESS`, which does nothing.
"""

from __future__ import annotations

import atexit
import logging
import os
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor

from raptor.progress import started_processes

_DEVICES = ("auto", "cpu", "cuda")
COLLECTIVE_TIMEOUT = timedelta(hours=2)  # rank 0 finishes, validates and writes while the others wait
_CPU = torch.device("cpu")
_NUM_SENT = 1024  # rows that one rank sends to the others at once
CACHE_SHARE = 0.3
"""The share of free memory that decoded images may take."""
T = TypeVar("T")
HAS_TRITON = find_spec("triton") is not None
"""Our kernels need it; torch comes without it on a Mac and in the build for the CPU only."""


def pick_device(device: str) -> str:
    """`auto` is the GPU when there is one."""
    if device not in _DEVICES:
        raise ValueError(f"unknown device {device!r}: choose from {', '.join(_DEVICES)}")
    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("no CUDA device here: use --device cpu")
    return device


def pick_precision(precision: str, device: str) -> str:
    """`auto` is bf16 on a GPU and fp32 elsewhere (on the CPU bf16 does not pay)."""
    if precision == "auto":
        return "bf16" if device == "cuda" else "fp32"
    if precision not in ("fp32", "bf16"):
        raise ValueError(f"unknown precision {precision!r}: choose from auto, fp32, bf16")
    return precision


def device_name(device: str | torch.device) -> str:
    """The device as summaries name it."""
    if torch.device(device).type == "cuda":
        return torch.cuda.get_device_name(device)
    return "cpu"


@contextmanager
def torch_defaults() -> Iterator[None]:
    """Inside the context torch is set as in a new process: gradients, no autocast, float32, and tensors on the CPU.

    What is opened or made here must not depend on the program around it. In `inference_mode` weights would be made that
    can never be trained, under autocast half-precision copies of weights outlive a load, and another default dtype or
    device would change the weights themselves.
    """
    dtype = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        with ExitStack() as settings:
            settings.enter_context(torch.inference_mode(False))
            settings.enter_context(torch.enable_grad())
            for kind in ("cpu", "cuda", "mps"):
                # Autocast empties its cache of rounded weights where the outermost context ends, and this one is now
                # the outermost: with a cache every pass after the first would run on the weights of the first.
                settings.enter_context(torch.autocast(kind, enabled=False, cache_enabled=False))
            # Only where it is another: this context costs every call of torch some time.
            if torch.get_default_device() != _CPU:
                settings.enter_context(_CPU)
            yield
    finally:
        torch.set_default_dtype(dtype)


@contextmanager
def full_precision(device: torch.device) -> Iterator[None]:
    """No gradients, no autocast and no TF32, whatever the caller trains with: for measurements."""
    switches = [torch.backends.cuda.matmul, torch.backends.cudnn.conv]  # type: ignore[attr-defined]
    before = [switch.fp32_precision for switch in switches]
    for switch in switches:
        switch.fp32_precision = "ieee"
    try:
        # No cache, as in `torch_defaults`.
        with torch.no_grad(), torch.autocast(device.type, enabled=False, cache_enabled=False):
            yield
    finally:
        for switch, value in zip(switches, before):
            switch.fp32_precision = value


def to_device(values: Tensor, device: torch.device) -> Tensor:
    """`values` on `device`, copied without waiting: through pinned memory, since the host waits for any other."""
    if device.type == "cuda" and values.device.type == "cpu":
        values = values.pin_memory()
    return values.to(device, non_blocking=True)


def is_out_of_memory(error: Exception) -> bool:
    """Whether a device, or the host, had no memory left."""
    return isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error)


# What torch says when it cannot reach another rank; neither gloo nor NCCL has an exception of its own for it.
_LOST_RANK = ("gloo", "NCCL", "Connection closed by peer", "Connection reset by peer", "Broken pipe")


def is_lost_rank(error: Exception) -> bool:
    """Whether another process of this command has ended while this one waited for it."""
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in _LOST_RANK)


def free_bytes(device: torch.device) -> int:
    """Memory that is free on a device, or to this process on the host; 8 GiB where the host does not say."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    try:
        free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        free = 8 * 2**30
    return min([free, *_left_in_groups()])


def _left_in_groups(own: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")) -> list[int]:
    """What the limits of a container or of a cluster's job still leave to this process, without files that are cached.

    own, root: where Linux says in which control group (version 2) a process is, and where these are.
    """
    try:
        found = re.search(r"^0::/*(.*)$", own.read_text(), re.MULTILINE)
    except OSError:
        return []
    if found is None:
        return []
    group = root / found[1]
    left = []
    for folder in [group, *group.parents]:
        try:
            limit = int((folder / "memory.max").read_text())  # ValueError for "max"
            used = int((folder / "memory.current").read_text())
            kept = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
            left.append(max(0, limit - used + int(kept.get("inactive_file", 0))))
        except (OSError, ValueError):
            continue
        if folder == root:
            break
    return left


@contextmanager
def seeded(seed: int = 0) -> Iterator[None]:
    """Random weights that are made inside are the same on every rank and in every run; the caller's numbers go on."""
    gpus = range(0)
    if torch.cuda.is_initialized():  # otherwise this would start CUDA, which takes a second and a GPU's memory
        gpus = range(torch.cuda.device_count())
    with torch.random.fork_rng(devices=gpus):
        torch.manual_seed(seed)
        yield


@dataclass(frozen=True)
class Ranks:
    """The processes that share the images of a command; see `join_ranks`.

    Attributes:
        rank: the number of this process, from 0. size: how many there are.
        device: that this process runs on.
    """

    rank: int = 0
    size: int = 1
    device: torch.device = _CPU

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0, the only one that prints, draws and writes results."""
        return self.rank == 0

    def share(self, items: Sequence[T]) -> Sequence[T]:
        """This rank's items, dealt out in turn."""
        return items[self.rank :: self.size]

    def sum(self, value: Tensor | None) -> Tensor:
        """The sum over ranks, on every rank. None, or a zero of shape (), on a rank that has seen no image."""
        if self.size == 1:
            assert value is not None
            return value
        if value is None:
            value = torch.zeros((), dtype=torch.float64)
        kinds = self.gather((tuple(value.shape), value.dtype))
        # The largest is of a rank that has seen images; the others are zeros.
        shape, dtype = max(kinds, key=lambda kind: len(kind[0]))
        total = value.to(self.device, dtype).expand(shape).contiguous().clone()
        dist.all_reduce(total)
        return total

    def add_(self, value: Tensor) -> Tensor:
        """`sum` in place, of a tensor that has one shape on all ranks: for every step of a training."""
        if self.size > 1:
            dist.all_reduce(value)
        return value

    def gather(self, value: T) -> list[T]:
        """The small values of all ranks, in their order, on every rank."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value)
        return values

    def rows(self, rows: Tensor | None) -> list[Tensor]:
        """The rows (N, ...) of all ranks, in their order, on rank 0; elsewhere none. One rank sends after the other."""
        if rows is None:
            rows = torch.empty(0)
        kinds = self.gather((tuple(rows.shape), rows.dtype, rows.device.type))
        found: list[Tensor] = []
        for rank, (shape, dtype, place) in enumerate(kinds):
            if 0 in shape:
                continue
            if rank == self.rank == 0:
                found.append(rows)
            elif rank == self.rank:
                dist.send(rows.to(self.device).contiguous(), 0)
            elif self.is_first:
                received = torch.empty(shape, dtype=dtype, device=self.device)
                dist.recv(received, rank)
                if place == "cpu":  # where the rows of rank 0 are too
                    received = received.cpu()
                found.append(received)
        return found

    def fill(self, whole: Tensor, own: Tensor) -> None:
        """Fill `whole` (N, ...) on every rank with the rows that the ranks hold: `own` are those that `share` deals."""
        for rank in range(self.size):
            rows = whole[rank :: self.size]
            # In pieces, because a copy of all rows would take as much memory as they do.
            for start in range(0, len(rows), _NUM_SENT):
                if rank == self.rank:
                    piece = own[start : start + _NUM_SENT].to(self.device)
                else:
                    piece = torch.empty_like(rows[start : start + _NUM_SENT], device=self.device)
                dist.broadcast(piece, rank)
                rows[start : start + _NUM_SENT] = piece.to(rows.device)

    def first(self, function: Callable[[], T]) -> T:
        """What `function` returns on rank 0, sent to all; what it raises there is raised on all. Tensors on the CPU."""
        if self.size == 1:
            return function()
        outcome: list[Any] = [None, None, None]  # the value, or the kind of an error and its text
        failure: Exception | None = None
        if self.is_first:
            try:
                outcome[0] = function()
            except Exception as error:
                failure = error
                kind: type[Exception] = RuntimeError
                if isinstance(error, ValueError | OSError):  # of a user, who is told in one line
                    kind = ValueError
                outcome[1:] = [kind, str(error)]
        dist.broadcast_object_list(outcome, 0)
        value, kind_of_error, text = outcome
        if failure is not None:
            raise failure
        if kind_of_error is not None:
            raise kind_of_error(text)
        return cast(T, value)


ONE_PROCESS = Ranks()


def join_ranks(device: str) -> Ranks:
    """This process among those that torchrun or srun started; by itself it is the only one, and nothing is loaded."""
    if started_processes()[1] == 1:
        return Ranks(device=torch.device(device))
    return ranks_of(open_fabric(device, "fp32"))


def ranks_of(fabric: Any) -> Ranks:
    """The ranks that Fabric has connected."""
    return Ranks(fabric.global_rank, fabric.world_size, fabric.device)


def open_fabric(device: str, precision: str) -> Any:
    """Lightning Fabric for this process: one device, or this rank's under torchrun and Slurm.

    Where torchrun starts more processes than there are GPUs, they share these and talk over gloo, because NCCL refuses
    two ranks on one GPU.
    """
    from lightning_fabric import Fabric
    from lightning_fabric.plugins.environments import LightningEnvironment
    from lightning_fabric.strategies import DDPStrategy

    logging.getLogger("lightning_fabric").setLevel(logging.WARNING)  # hides its notices about precision
    kind: Any = {"bf16": "bf16-mixed", "fp32": "32-true"}[precision]
    world = started_processes()[1]
    if world == 1:
        alone = Fabric(accelerator=device, devices=1, precision=kind, plugins=[LightningEnvironment()])
        alone.launch()
        return alone
    _check_launcher()
    local, num_nodes = _processes_per_node(world)
    places = [torch.device("cpu")] * local
    backend = None
    if device == "cuda":
        num_gpus = torch.cuda.device_count()
        places = [torch.device("cuda", i % num_gpus) for i in range(local)]
        if num_gpus < local and "LOCAL_WORLD_SIZE" in os.environ:  # srun may show each task only its own GPU
            backend = "gloo"
    # Each rank draws its own stochastic-depth masks, which are buffers: rank 0's must not replace them. Newer torch
    # warns of that option, and has no other that leaves buffers alone from the start.
    warnings.filterwarnings("ignore", message=".*`broadcast_buffers` is deprecated")
    # Fabric wraps a module on a stream of its own. Autograd then waits between the streams, and torch warns of it.
    warnings.filterwarnings("ignore", message="The AccumulateGrad node's stream does not match")
    strategy = DDPStrategy(
        parallel_devices=places,
        process_group_backend=backend,
        timeout=COLLECTIVE_TIMEOUT,
        broadcast_buffers=False,
    )
    fabric = Fabric(accelerator=device, devices=1, num_nodes=num_nodes, strategy=strategy, precision=kind)
    fabric.launch()
    atexit.register(_leave_group)
    return fabric


def processes_here() -> int:
    """How many processes of this command share this machine."""
    world = started_processes()[1]
    if world == 1:
        return 1
    return _processes_per_node(world)[0]


def _processes_per_node(world: int) -> tuple[int, int]:
    """Processes on each node, and the number of nodes, as torchrun or srun tells them."""
    if "RANK" in os.environ:
        local = int(os.environ.get("LOCAL_WORLD_SIZE", world))
    elif "SLURM_NTASKS_PER_NODE" in os.environ:
        local = int(os.environ["SLURM_NTASKS_PER_NODE"])
    else:
        raise ValueError("srun must say how many processes a node has: srun --ntasks-per-node=N raptor ...")
    return local, max(1, world // local)


def _check_launcher() -> None:
    """Raise where RANK and WORLD_SIZE were set by hand: torch would wait for the others for hours, without a word."""
    if "RANK" in os.environ and "TORCHELASTIC_RUN_ID" not in os.environ:
        world = os.environ["WORLD_SIZE"]
        raise ValueError(
            f"WORLD_SIZE says {world} processes, and torchrun did not start this one: start them with torchrun, or "
            "unset RANK and WORLD_SIZE for a process by itself"
        )


def _leave_group() -> None:
    """Ranks leave together: a rank that ends while another one still waits for it would abort."""
    if dist.is_initialized():
        dist.destroy_process_group()
