"""`run_ranks`: a function in N gloo processes, in a tenth of a second instead of N imports of torch.

A server process, started at first use, has imported torch and transformers and does nothing else. For
each job it forks N children. It ends when the pipe from this process closes, so also when this process
is killed; children die with the server.

    this process --job--> server --fork--> rank 0 .. N-1 --results in files--> this process
"""

from __future__ import annotations

import atexit
import ctypes
import os
import pickle
import select
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

REPOSITORY = Path(__file__).parents[2]
PRELOADED = [
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
    "torch._dynamo",
    "transformers.models.gpt2.modeling_gpt2",
    "transformers.models.llama.modeling_llama",
    "transformers.models.qwen2.modeling_qwen2",
    "transformers.models.qwen3.modeling_qwen3",
    "transformers.models.qwen3_moe.modeling_qwen3_moe",
]
PR_SET_PDEATHSIG = 1
_server: subprocess.Popen[bytes] | None = None


class RankError(RuntimeError):
    """A rank raised, died or did not finish in time; the message holds the tracebacks."""


def run_ranks(function: Callable[..., Any], world_size: int, *args: Any, timeout: float = 60.0) -> list[Any]:
    """What `function(rank, *args)` returned in each of `world_size` ranks of a gloo process group.

    `function` is a top-level function of an importable module; arguments and results are pickled.
    """
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        # The function is pickled apart: only a child unpickles it, once the module can be imported.
        _save((function, args), Path(folder, "call"))
        job = {"path": sys.path, "folder": folder, "world_size": world_size, "timeout": timeout}
        failure = _ask(pickle.dumps(job))
        if failure:
            raise RankError(failure)
        return [_load(_result_path(folder, rank)) for rank in range(world_size)]


def stop_server() -> None:
    """Ends the server, if one runs."""
    global _server
    if _server is not None:
        with _server:  # closes the pipes, then waits
            pass
        _server = None


def _save(value: Any, path: Path) -> None:
    """Writes a value to a file; torch's archive, since `pickle` loses float8 tensors."""
    import torch

    torch.save(value, path)


def _load(path: Path) -> Any:
    import torch

    return torch.load(path, weights_only=False)


def _ask(job: bytes) -> str:
    """The server's answer to a job: the failure, or nothing."""
    global _server
    if _server is None or _server.poll() is not None:
        _server = _start_server()
        atexit.register(stop_server)
    assert _server.stdin is not None
    assert _server.stdout is not None
    try:
        _send(_server.stdin, job)
        return pickle.loads(_receive(_server.stdout))
    except BaseException:  # interrupted half way: what comes next in the pipe is not ours
        _server.kill()
        _server.wait()
        _server = None
        raise


def _start_server() -> subprocess.Popen[bytes]:
    command = [sys.executable, "-c", "from tests.makers.ranks import serve; serve()"]
    quiet = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    environment = {**os.environ, **quiet, "GLOO_SOCKET_IFNAME": "lo", "HF_HUB_OFFLINE": "1"}
    return subprocess.Popen(
        command, cwd=REPOSITORY, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )


def _send(stream: IO[bytes], message: bytes) -> None:
    stream.write(len(message).to_bytes(8, "little") + message)
    stream.flush()


def _receive(stream: IO[bytes]) -> bytes:
    """The next message; `EOFError` if the other end is gone."""
    head = stream.read(8)
    if len(head) < 8:
        raise EOFError("the rank server is gone")
    return stream.read(int.from_bytes(head, "little"))


def _result_path(folder: str, rank: int) -> Path:
    return Path(folder, f"result_{rank}")


# ---- in the server ---------------------------------------------------------------------------------------


def serve() -> None:
    """Answers jobs from stdin until it closes."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever prints must not reach the pipe of answers
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # control-C is for the parent, which closes the pipe
    _preload()
    requests = sys.stdin.buffer.raw  # type: ignore[attr-defined]  # unbuffered, so that select() sees all
    while True:
        try:
            job = pickle.loads(_receive(_Exact(requests)))  # type: ignore[arg-type]
            _send(answers, pickle.dumps(_run_job(job)))
        except (EOFError, BrokenPipeError):  # the parent is gone
            os._exit(0)


class _Exact:
    """A raw stream whose `read` returns all of what is asked, unless the stream ends."""

    def __init__(self, raw: IO[bytes]) -> None:
        self.raw = raw

    def read(self, size: int) -> bytes:
        parts = []
        while size and (part := self.raw.read(size)):
            parts.append(part)
            size -= len(part)
        return b"".join(parts)


def _preload() -> None:
    import importlib
    import logging
    import warnings

    import torch

    torch.set_num_threads(1)
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)  # "is suboptimal"
    warnings.simplefilter("ignore", FutureWarning)  # what writes old formats is deprecated
    for name in PRELOADED:
        importlib.import_module(name)


def _run_job(job: dict[str, Any]) -> str:
    """Forks the ranks and waits for them: the failure, or nothing. No child is left."""
    children = {_fork_rank(rank, job): rank for rank in range(job["world_size"])}
    failures: list[str] = []
    deadline = time.monotonic() + job["timeout"]
    while children and time.monotonic() < deadline:
        if not (pid_status := _wait_any(children)):
            if select.select([0], [], [], 0.005)[0]:  # no new job comes before the answer: the pipe closed
                deadline = 0.0
            continue
        pid, status = pid_status
        rank = children.pop(pid)
        if status:
            failures.append(_failure(job["folder"], rank, status))
            deadline = min(deadline, time.monotonic() + 1.0)  # the others will wait for it in vain
    if children and not failures:
        failures.append(f"ranks {sorted(children.values())} did not finish in {job['timeout']} s")
    for pid in children:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    return "\n".join([*failures[:1], *(text.strip().rpartition("\n")[2] for text in failures[1:])])


def _wait_any(children: dict[int, int]) -> tuple[int, int] | None:
    for pid in children:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return pid, status
    return None


def _failure(folder: str, rank: int, status: int) -> str:
    note = Path(folder, f"failure_{rank}.txt")
    reason = note.read_text() if note.exists() else f"died with wait status {status}"
    return f"rank {rank}: {reason}"


def _fork_rank(rank: int, job: dict[str, Any]) -> int:
    """The process id of a new child that runs the job as `rank`."""
    server = os.getpid()
    if pid := os.fork():
        return pid
    status = 1
    try:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() == server:
            _run_rank(rank, job)
            status = 0
    except BaseException:
        Path(job["folder"], f"failure_{rank}.txt").write_text(traceback.format_exc())
    finally:
        os._exit(status)


def _run_rank(rank: int, job: dict[str, Any]) -> None:
    import torch.distributed as dist

    sys.path[:] = job["path"]
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(job["world_size"]), LOCAL_RANK=str(rank))
    store = dist.FileStore(os.path.join(job["folder"], "store"), job["world_size"])
    dist.init_process_group("gloo", store=store, rank=rank, world_size=job["world_size"])
    function, args = _load(Path(job["folder"], "call"))
    _save(function(rank, *args), _result_path(job["folder"], rank))
    dist.barrier()  # gloo complains loudly when a peer leaves early
    dist.destroy_process_group()
