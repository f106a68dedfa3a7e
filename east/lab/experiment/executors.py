"""Where work runs: in this process, in a process per core or GPU, on a Ray cluster, or as SLURM jobs.

`execute(function, queue, place)` takes jobs from the queue and yields (job, result) as they finish. The consumer may
append to the queue between results. Functions write their results to disk and skip what is already there, so running a
job twice is harmless: if a worker dies, its job is run again. A function never raises and returns plain data. A job
that could not be finished yields Lost.
"""

import logging
import math
import multiprocessing
import os
import pickle
import signal
import socket
import sys
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext, SpawnContext
from pathlib import Path
from typing import Any, TypeAlias

from east.choices import ConfigError, EscapedStream
from east.lab import bars
from east.lab.settings.settings import Executor, Settings

WORTH_REPORTING = 60.0  # seconds; a longer command reports how long its workers were idle

Job: TypeAlias = Any  # whatever the function takes; it must survive pickling
Function: TypeAlias = Callable[[Job], Any]
Results: TypeAlias = Generator[tuple[Job, Any], None, None]  # closing it ends the workers
Slot: TypeAlias = str | None  # a GPU's number, or None for a core


@dataclass(frozen=True)
class Lost:
    """A job that could not be finished, and why."""

    reason: str


@dataclass(frozen=True)
class Place:
    """Where a command's work runs: the executor, the slots of this machine, and a folder for a cluster's files.

    deadline: the time.monotonic() at which processes are stopped.
    """

    executor: Executor
    slots: tuple[Slot, ...] = (None,)
    folder: Path = Path()
    deadline: float = math.inf

    @property
    def parallel(self) -> int:
        """How many jobs run at once."""
        executor = self.executor
        if executor.name not in ("ray", "submitit"):
            return len(self.slots)
        cluster = executor.cluster if executor.name == "submitit" else executor.address or os.environ.get("RAY_ADDRESS")
        here = cluster == "local" or (executor.name == "ray" and not cluster)  # Ray joins the one of the environment
        return min(executor.parallel, len(slots("cpu"))) if here else executor.parallel

    @property
    def width(self) -> int:
        """How many jobs keep every slot busy; 1 on a cluster's GPUs, where a population is better left whole."""
        return 1 if self.executor.name in ("ray", "submitit") and self.executor.gpus else self.parallel


def choose_place(settings: Settings, much_work: bool) -> Place:
    """The executor with its slots. `auto` uses processes only for `much_work`, because starting one takes seconds."""
    executor = settings.executor
    if executor.name == "ray":
        refuse_dead_cluster(executor.address)
    if executor.name not in ("auto", "processes"):
        return Place(executor, folder=Path(settings.results_dir).resolve() / "sweeps" / "submitit")
    available = slots(settings.device)
    places = tuple(available[k % len(available)] for k in range(executor.slots or len(available)))
    if executor.name == "auto" and not (much_work and len(places) > 1):
        return Place(executor.but(name="inline"))
    return Place(executor.but(name="processes"), places)


def refuse_dead_cluster(address: str | None) -> None:
    """ConfigError if nothing listens there; Ray itself would retry for minutes and log every attempt."""
    host, _, port = (address or "").removeprefix("ray://").rpartition(":")
    if port.isdigit():
        try:
            socket.create_connection((host, int(port)), timeout=5).close()
        except OSError as error:
            why = error.strerror or error
            raise ConfigError(f"executor.address={address}: no Ray cluster answers there ({why})") from error


def slots(device: str) -> Sequence[Slot]:
    """One entry per process that this machine can run at once: a GPU's number, or None for a core."""
    if device in ("auto", "cuda"):
        import torch

        if torch.cuda.is_available():
            visible = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(torch.cuda.device_count())))
            return visible.split(",")[: torch.cuda.device_count()]
    if device not in ("auto", "cpu"):
        return [None]
    from joblib import cpu_count

    return [None] * cpu_count()


def execute(function: Function, queue: deque[Job], place: Place) -> Results:
    """Run the jobs where `place` says."""
    return RUNNERS[place.executor.name](function, queue, place)


def inline(function: Function, queue: deque[Job], place: Place) -> Results:
    while queue:
        job = queue.popleft()
        yield job, function(job)


def processes(function: Function, queue: deque[Job], place: Place) -> Results:
    """One worker per slot. A killed worker is replaced, and its job retried `retries` times, after the others."""
    retries, free, victims = place.executor.retries, list(place.slots), []
    started, busy_seconds = 0.0, 0.0  # counted from the first job: starting the first worker takes seconds
    idle: list[Worker] = []
    busy: dict[Connection, Worker] = {}
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # read by a worker's libraries when they load
    try:
        while queue or busy:
            while queue and (idle or free):
                worker = idle.pop() if idle else Worker(function, free.pop())
                worker.give(queue.popleft())
                started = started or worker.since
                busy[worker.pipe] = worker
            left = None if place.deadline == math.inf else max(0.0, place.deadline - time.monotonic())
            ready = wait(list(busy), left)
            if not ready:
                yield from ((job, Lost("time was up")) for job in (*(worker.job for worker in busy.values()), *queue))
                return
            for pipe in ready:
                worker = busy.pop(pipe)  # type: ignore[call-overload]
                busy_seconds += time.monotonic() - worker.since
                try:
                    result = pickle.loads(worker.pipe.recv_bytes())
                    idle.append(worker)
                except (EOFError, ConnectionResetError):
                    worker.process.join()
                    free.append(worker.gpu)
                    victims.append(worker.job)
                    if sum(job is worker.job for job in victims) <= retries:
                        queue.append(worker.job)
                        continue
                    memory = ", as when memory runs out" if worker.process.exitcode == -signal.SIGKILL else ""
                    result = Lost(f"its process ended {retries + 1} times, with code {worker.process.exitcode}{memory}")
                yield worker.job, result
        seconds = time.monotonic() - started
        if started and seconds >= WORTH_REPORTING:
            idle_share = 1 - busy_seconds / (len(place.slots) * seconds)
            bars.say(f"{len(place.slots)} workers, idle {idle_share:.1%} of {seconds / 60:.1f} min")
    finally:
        with ignoring_interrupts():  # a second Ctrl-C must not interrupt this
            for worker in [*idle, *busy.values()]:
                worker.stop()


class Worker:
    """A process that runs one job at a time, on one thread; it sees only its `gpu`, if it has one."""

    def __init__(self, function: Function, gpu: str | None):
        context = start_method()
        self.pipe, theirs = context.Pipe()
        variables = dict(os.environ) | ({} if gpu is None else {"CUDA_VISIBLE_DEVICES": gpu})
        self.process = context.Process(target=work, args=(pickled(function), theirs, variables), daemon=True)
        with ignoring_interrupts():
            self.process.start()
        theirs.close()
        self.gpu = gpu
        self.job: Job = None
        self.since = 0.0  # when it was given its job

    def give(self, job: Job) -> None:
        self.job, self.since = job, time.monotonic()
        with suppress(BrokenPipeError):  # it died while idle; reading its result will show that
            self.pipe.send_bytes(pickled(job))

    def stop(self) -> None:
        self.process.kill()  # whatever it is writing stays a temporary file
        self.process.join()
        self.pipe.close()


def pickled(value: object) -> bytes:
    """Multiprocessing itself would move tensors to shared memory, which may be small, and refuse a user's lambdas."""
    from joblib.externals.loky.backend.reduction import dumps

    return bytes(dumps(value))


def start_method() -> SpawnContext | ForkServerContext:
    """How workers start: on Linux as forks of a server that has imported torch but never used it, which is fast and
    shares memory; elsewhere, where that is not safe, as new interpreters."""
    if sys.platform != "linux":
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["east.lab.experiment.jobs"])
    return context


@contextmanager
def ignoring_interrupts() -> Iterator[None]:
    """Ignore Ctrl-C in this block and in processes started in it; their parent handles it."""
    main = threading.current_thread() is threading.main_thread()
    before = signal.signal(signal.SIGINT, signal.SIG_IGN) if main else None
    try:
        yield
    finally:
        if main:
            signal.signal(signal.SIGINT, before)


def work(function: bytes, pipe: Connection, variables: dict[str, str]) -> None:
    """The main loop of a worker, in its parent's environment; it ends whenever its parent does."""
    os.environ.update(variables)
    threading.Thread(target=end_with_parent, daemon=True).start()
    sys.stderr = EscapedStream(sys.stderr)  # type: ignore[assignment]
    warnings.showwarning = lambda message, *_: print(f"warning: {message}", file=sys.stderr)  # as in the parent
    run = pickle.loads(function)
    with suppress(EOFError):
        while True:
            pipe.send_bytes(pickled(single_threaded(run, pickle.loads(pipe.recv_bytes()))))


def end_with_parent() -> None:
    wait([multiprocessing.parent_process().sentinel])  # type: ignore[union-attr]
    os._exit(1)


def single_threaded(function: Function, job: Job) -> Any:
    import torch

    torch.set_num_threads(1)
    return function(job)


def ray(function: Function, queue: deque[Job], place: Place) -> Results:
    """Tasks of Ray core, which reruns those lost with a worker or node."""
    executor = place.executor
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    import ray

    started = not ray.is_initialized()
    if started:
        try:
            ray.init(address=executor.address, log_to_driver=False, logging_level=logging.ERROR)
        except ConnectionError as error:  # no cluster runs here, or something else listens there
            raise ConfigError(f"executor.address={executor.address}: no Ray cluster answers there") from error
    task = ray.remote(num_cpus=executor.cpus, num_gpus=executor.gpus, max_retries=executor.retries)(single_threaded)
    running: dict[Any, Job] = {}
    try:
        while queue or running:
            while queue:
                job = queue.popleft()
                running[task.remote(function, job)] = job
            for reference in ray.wait(list(running), num_returns=1)[0]:
                try:
                    result = ray.get(reference)
                except ray.exceptions.RayError as error:
                    result = Lost(str(error).splitlines()[0])
                yield running.pop(reference), result
    finally:
        if started:
            ray.shutdown()


def submitit(function: Function, queue: deque[Job], place: Place) -> Results:
    """Arrays of SLURM jobs; `cluster=local` runs them as processes here. A pre-empted job is queued again."""
    import submitit

    executor = place.executor
    runner = submitit.AutoExecutor(folder=place.folder, cluster=executor.cluster)
    runner.update_parameters(
        timeout_min=executor.minutes, cpus_per_task=int(executor.cpus), gpus_per_node=int(executor.gpus)
    )
    slurm = runner.cluster == "slurm"
    if slurm:
        partition = {"partition": executor.partition} if executor.partition else {}
        options = {"array_parallelism": executor.parallel, **partition, **executor.slurm}
        runner.update_parameters(**{f"slurm_{key}": value for key, value in options.items()})
    running: dict[Any, Job] = {}
    try:
        while queue or running:
            # SLURM limits an array itself; local jobs all start at once
            room = len(queue) if slurm else min(len(queue), max(0, place.parallel - len(running)))
            jobs = [queue.popleft() for _ in range(room)]
            running |= zip(runner.map_array(Restartable(function), jobs), jobs, strict=True) if jobs else ()
            handle = next(submitit.helpers.as_completed(list(running), poll_frequency=1))
            try:
                result = handle.result()
            except (submitit.core.utils.FailedJobError, submitit.core.utils.UncompletedJobError) as error:
                result = Lost(str(error).splitlines()[0])
            yield running.pop(handle), result
    finally:
        for handle in running:
            handle.cancel()


class Restartable:
    """A job that submitit may stop at its time limit and restart: it resumes from what it wrote to disk."""

    def __init__(self, function: Function):
        self.function = function

    def __call__(self, job: Job) -> Any:
        return single_threaded(self.function, job)

    def checkpoint(self, job: Job) -> Any:
        from submitit.helpers import DelayedSubmission

        return DelayedSubmission(self, job)


RUNNERS = {"inline": inline, "processes": processes, "ray": ray, "submitit": submitit}


def interruptible() -> None:
    """Make SIGTERM end a run as Ctrl-C does: finished trials are kept, and the exit code is 130."""

    def interrupt(number: int, _frame: Any) -> None:
        raise KeyboardInterrupt(signal.Signals(number).name)

    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, interrupt)
