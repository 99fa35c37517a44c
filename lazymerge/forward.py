"""Two model folders run by transformers on one prompt: the logits compared. In a process of its own.

Both are loaded in fp32 on the CPU, one after the other, without network; code that comes with a model runs
only if it is trusted. The process is lazymerge.conversions.logits.
"""

from __future__ import annotations

import json
import logging
import math
import os
import signal
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lazymerge.budget import available
from lazymerge.conversions.adapters.adapter import CONFIG as ADAPTER
from lazymerge.errors import BudgetError, PlanError, SourceError
from lazymerge.formats.huggingface import read_model
from lazymerge.sidecars import CONFIG

TOKENS = 16
"""Length of the prompt."""

CLOSE = 1e-3
"""The largest difference, as a part of the largest logit, that is still taken for rounding."""

MEMORY = 2 << 30
"""Bytes that the process may take beyond its imports and twice the larger folder's weights in fp32."""

SECONDS = 120
"""Of processor time that it may take, and as many for each GB of both folders' weights in fp32."""

_WAIT = 3600
"""Seconds until a process that does not end is given up."""

_ROOT = Path(__file__).parents[1]

log = logging.getLogger("lazymerge.waits")


@dataclass(frozen=True, slots=True)
class ForwardReport:
    """What both models answered to the prompt.

    `shape` are the logits' (of the first); `largest` is their largest difference, `magnitude` the largest
    logit (None where shapes differ or a logit is not finite); `agreeing` at how many of `positions` the
    largest logit is the same one. `missing` and `unexpected` are weights that transformers did not find for
    each of the models, or had no place for; where any is missing, nothing is run.
    """

    class_names: tuple[str, str]
    shapes: tuple[tuple[int, ...], tuple[int, ...]]
    positions: int
    agreeing: int
    largest: float | None
    magnitude: float | None
    missing: tuple[tuple[str, ...], tuple[str, ...]]
    unexpected: tuple[tuple[str, ...], tuple[str, ...]]

    @property
    def same(self) -> bool:
        """Whether both were loaded whole and answered alike."""
        if self.largest is None or self.magnitude is None or any(self.missing):
            return False
        return self.agreeing == self.positions and self.largest <= CLOSE * self.magnitude

    def to_json(self) -> dict[str, Any]:
        """The report as plain data for JSON."""
        return {"same": self.same, **asdict(self)}


def compare_logits(one: Path, other: Path, *, trust_remote_code: bool = False) -> ForwardReport:
    """Run both folders on the prompt and compare.

    Raises `PlanError` where one is no Hugging Face folder, `BudgetError` where one does not fit the memory
    that is free, and `SourceError` where transformers does not load or run it.
    """
    sizes = [_check(folder) for folder in (one, other)]
    request = {
        "folders": [str(folder.absolute()) for folder in (one, other)],
        "trust_remote_code": trust_remote_code,
        "tokens": TOKENS,
        "seconds": SECONDS + SECONDS * sum(sizes) // 10**9,
        "memory": MEMORY + 2 * max(sizes),
    }
    answer = _ask(request)
    if "refused" in answer:
        raise SourceError(
            f"{(one, other)[answer['folder']]}: transformers does not run it: {answer['refused']}",
            "verify without --forward; a model that comes with code of its own needs --trust-remote-code",
        )
    shapes = answer["shapes"]
    positions = math.prod(shapes[0][:-1]) if shapes[0] else 0
    return ForwardReport(
        _pair(answer["class_names"]),
        (tuple(shapes[0]), tuple(shapes[1])),
        positions,
        answer["agreeing"],
        answer["largest"],
        answer["magnitude"],
        (tuple(answer["missing"][0]), tuple(answer["missing"][1])),
        (tuple(answer["unexpected"][0]), tuple(answer["unexpected"][1])),
    )


def _pair(found: list[str]) -> tuple[str, str]:
    one, other = found
    return one, other


def _check(folder: Path) -> int:
    """The bytes that the folder's weights take in fp32."""
    if not (folder / CONFIG).is_file():
        raise PlanError(
            f"--forward: {folder} holds no {CONFIG}, so that transformers does not load it",
            "merge the checkpoint first, then verify the result with --forward",
        )
    if os.path.lexists(folder / ADAPTER):
        raise PlanError(
            f"--forward: {folder} holds {ADAPTER}, and transformers would load the model that it names",
            "move it away, or verify without --forward",
        )
    tensors, _ = read_model(folder)
    needed = 4 * sum(gather.numel for gather in tensors.values())
    free = available()
    if needed > free:
        raise BudgetError(
            f"--forward: {folder} takes {needed // 10**6} MB in fp32, {free // 10**6} MB are free",
            "verify without --forward, or on a larger machine",
        )
    return needed


def _ask(request: dict[str, Any]) -> dict[str, Any]:
    """The answer of lazymerge.conversions.logits."""
    log.info("running %s in transformers", " and ".join(request["folders"]))
    with tempfile.TemporaryDirectory() as scratch:
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([*filter(None, sys.path), str(_ROOT)]),
            "HF_HUB_OFFLINE": "1",
            "HF_MODULES_CACHE": scratch,  # copies of trusted code, which would else stay in the user's cache
            "CUDA_VISIBLE_DEVICES": "",
        }
        # -P: a torch.py in the current folder is not what is meant
        command = [sys.executable, "-P", "-W", "ignore", "-m", "lazymerge.conversions.logits"]
        try:
            done = subprocess.run(
                command,
                input=json.dumps(request).encode(),
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env=environment,
                timeout=_WAIT,
            )
        except subprocess.TimeoutExpired as error:
            raise SourceError(
                f"{' and '.join(request['folders'])}: not run within {_WAIT} s", "verify without --forward"
            ) from error
        except OSError as error:
            raise PlanError(f"{sys.executable}: {error.strerror}", "verify without --forward") from error
    if done.returncode == -signal.SIGXCPU:
        raise SourceError(
            f"{' and '.join(request['folders'])}: not run within {request['seconds']} s of processor time",
            "verify without --forward",
        )
    try:
        answer: dict[str, Any] = json.loads(done.stdout)
    except ValueError as error:
        raise PlanError(
            f"running the models ended with exit code {done.returncode}",
            "see that `python -c 'import transformers'` works, and that one of them fits the memory",
        ) from error
    return answer
