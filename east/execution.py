"""Where work runs: in this process, in a process per core or GPU, on a Ray cluster, or as SLURM jobs.

`execute(function, jobs, executor)` yields (job, result) in the order in which jobs end. Functions write their results
to disk and find what is done there, so doing a job twice is harmless: a job whose worker is lost is simply run again.
A function never raises to its executor; what it returns is plain data. A job that could not be run at all yields Lost.
"""

import multiprocessing
import os
import signal
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

Job = dict[str, Any]
Function = Callable[[Job], Any]


@dataclass(frozen=True)
class Lost:
    """A job whose worker died again and again."""

    reason: str


def execute(function: Function, jobs: Sequence[Job], executor: Mapping[str, Any]) -> Iterator[tuple[Job, Any]]:
    """Run the jobs as executor["name"] says; the other keys are those of conf/executor/<name>.yaml."""
    return RUNNERS[executor["name"]](function, jobs, **{key: v for key, v in executor.items() if key != "name"})


def inline(function: Function, jobs: Sequence[Job]) -> Iterator[tuple[Job, Any]]:
    for job in jobs:
        yield job, function(job)


def slots(device: str) -> list[str | None]:
    """One entry per process that this machine feeds at once: a GPU's number, or None for a core."""
    if device in ("auto", "cuda"):
        import torch

        if torch.cuda.is_available():
            return [str(k) for k in range(torch.cuda.device_count())]
    if device not in ("auto", "cpu"):
        return [None]
    return [None] * len(os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1))


class Worker:
    """A process that takes jobs one by one, with one thread and, where `gpu` is given, that GPU alone."""

    def __init__(self, function: Function, gpu: str | None):
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=work, args=(function, theirs, gpu), daemon=True)
        self.process.start()
        theirs.close()
        self.gpu = gpu
        self.job: Job | None = None

    def give(self, job: Job) -> None:
        self.job = job
        self.pipe.send(job)

    def stop(self) -> None:
        self.process.terminate()
        self.process.join(timeout=5)
        if self.process.is_alive():
            self.process.kill()


def work(function: Function, pipe: Connection, gpu: str | None) -> None:
    """The life of a worker. Ctrl-C is its parent's business, and it ends when its parent does."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=end_with_parent, daemon=True).start()
    if gpu is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = gpu
    import torch

    torch.set_num_threads(1)
    while True:
        try:
            job = pipe.recv()
        except EOFError:
            return
        pipe.send(function(job))


def end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os._exit(1)


def processes(
    function: Function, jobs: Sequence[Job], slots: Sequence[str | None] = (None,), retries: int = 2
) -> Iterator[tuple[Job, Any]]:
    """A worker per slot. One that is killed is replaced, and its job tried again `retries` times."""
    waiting = deque(jobs)
    tries: dict[int, int] = {}
    workers: list[Worker] = []
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # read by a worker's libraries when they load
    try:
        workers += [Worker(function, gpu) for gpu in slots[: len(jobs)]]
        while waiting or any(worker.job is not None for worker in workers):
            for worker in workers:
                if worker.job is None and waiting:
                    worker.give(waiting.popleft())
            ready = wait([worker.pipe for worker in workers if worker.job is not None])
            for worker in [worker for worker in workers if worker.pipe in ready]:
                job, worker.job = worker.job, None
                assert job is not None
                try:
                    yield job, worker.pipe.recv()
                except (EOFError, ConnectionResetError):
                    worker.process.join()
                    code = worker.process.exitcode
                    workers[workers.index(worker)] = Worker(function, worker.gpu)
                    tries[id(job)] = tries.get(id(job), 0) + 1
                    if tries[id(job)] <= retries:
                        waiting.appendleft(job)
                    else:
                        yield job, Lost(f"its process ended {tries[id(job)]} times, last with {ending(code)}")
    finally:
        for worker in workers:
            worker.stop()


def ending(code: int | None) -> str:
    """An exit code in words."""
    if code is not None and code < 0:
        name = signal.Signals(-code).name
        return f"{name}{', as when memory runs out' if name == 'SIGKILL' else ''}"
    return f"exit code {code}"


def ray(
    function: Function,
    jobs: Sequence[Job],
    address: str | None = None,
    cpus: float = 1,
    gpus: float = 0,
    retries: int = 3,
) -> Iterator[tuple[Job, Any]]:
    """Tasks of Ray core. Ray retries what a dead worker or node has lost."""
    ray = extra("ray", "ray")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    started = not ray.is_initialized()
    if started:
        ray.init(address=address, log_to_driver=False, logging_level="ERROR")
    try:
        options = {"num_cpus": cpus, "num_gpus": gpus, "max_retries": retries}
        remote = ray.remote(single_threaded).options(**options)
        waiting = {remote.remote(function, job): job for job in jobs}
        while waiting:
            ended, _ = ray.wait(list(waiting), num_returns=1)
            job = waiting.pop(ended[0])
            try:
                yield job, ray.get(ended[0])
            except ray.exceptions.RayError as error:
                yield job, Lost(str(error).splitlines()[0])
    finally:
        if started:
            ray.shutdown()


def submitit(
    function: Function,
    jobs: Sequence[Job],
    cluster: str | None = None,
    partition: str | None = None,
    minutes: int = 720,
    cpus: int = 1,
    gpus: int = 0,
    parallel: int = 64,
    slurm: Mapping[str, Any] | None = None,
    folder: str = "results/sweeps/submitit",
) -> Iterator[tuple[Job, Any]]:
    """One array of SLURM jobs; `cluster=local` runs them as processes here. A pre-empted job is queued again."""
    library = extra("submitit", "slurm")
    runner = library.AutoExecutor(folder=Path(folder), cluster=cluster)
    runner.update_parameters(timeout_min=minutes, cpus_per_task=cpus, gpus_per_node=gpus)
    if runner.cluster == "slurm":
        further = {"array_parallelism": parallel, **({"partition": partition} if partition else {}), **(slurm or {})}
        runner.update_parameters(**{f"slurm_{key}": value for key, value in further.items()})
    task = Restartable(function)
    # SLURM limits an array's width itself; local jobs all start at once, so they are handed over in portions.
    portion = len(jobs) if runner.cluster == "slurm" else min(parallel, len(slots("cpu")))
    for k in range(0, len(jobs), portion):
        part = list(jobs[k : k + portion])
        running = dict(zip(runner.map_array(task, part), part, strict=True))
        for handle in library.helpers.as_completed(list(running)):
            try:
                yield running[handle], handle.result()
            except (library.core.utils.FailedJobError, library.core.utils.UncompletedJobError) as error:
                yield running[handle], Lost(str(error).splitlines()[0])


class Restartable:
    """A job that submitit may stop at its time limit and start again: it goes on from what it wrote to disk."""

    def __init__(self, function: Function):
        self.function = function

    def __call__(self, job: Job) -> Any:
        return single_threaded(self.function, job)

    def checkpoint(self, job: Job) -> Any:
        return extra("submitit", "slurm").helpers.DelayedSubmission(self, job)


def single_threaded(function: Function, job: Job) -> Any:
    import torch

    torch.set_num_threads(1)
    return function(job)


def extra(module: str, name: str) -> Any:
    """An optional library, or one line that says how to get it."""
    try:
        return __import__(module)
    except ImportError as error:
        raise ValueError(f"executor={module} needs the library {module}: pip install 'east[{name}]'") from error


RUNNERS = {"inline": inline, "processes": processes, "ray": ray, "submitit": submitit}


def on_signal(number: int, _frame: Any) -> None:
    """SIGTERM ends a run as Ctrl-C does: finished trials are kept, the exit code is 130."""
    raise KeyboardInterrupt(signal.Signals(number).name)


def interruptible() -> None:
    if threading.current_thread() is threading.main_thread() and sys.platform != "win32":
        signal.signal(signal.SIGTERM, on_signal)
