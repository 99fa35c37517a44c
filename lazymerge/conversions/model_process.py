"""transformers asked about a model, in a process of its own (lazymerge.conversions.meta_model).

It costs 350 MB and some seconds of imports, which are then not in the merge's memory, and a config that
nobody can trust (layers without end, sizes beyond any memory) ends with that process.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lazymerge.errors import DamagedFile, InconsistentCheckpoint, PlanError

SECONDS = 30
"""Of processor time that building a model takes at most; DeepSeek-V3 takes one, with its conversion six."""

MEMORY = 2 << 30
"""Bytes that building a model takes at most beyond the imports; DeepSeek-V3 takes 50 MB."""

ANSWER = 24 << 20
"""Bytes of an answer, which take ten times that when they are parsed. DeepSeek-V3's has 9 MB with its
conversion, one of its kind with 384 experts 13 MB."""

_WAIT = 600
"""Seconds until a process that neither works nor ends is given up."""

_ROOT = Path(__file__).parents[2]


log = logging.getLogger("lazymerge.waits")
"""Told before anything that takes seconds in which nothing else is told."""


class Contradiction(InconsistentCheckpoint):
    """config.json contradicts itself: no trainer can have built its model by it."""


def ask(request: dict[str, Any]) -> dict[str, Any] | None:
    """The answer of lazymerge.conversions.meta_model; None if transformers has no such class.

    Raises `InconsistentCheckpoint` for a config that its class refuses (`Contradiction` for one that nobody
    could take), `DamagedFile` for one that asks for
    more than `SECONDS`, `MEMORY` or `ANSWER`, and `PlanError` where the process cannot be run.
    """
    question = as_json(request)
    once = "" if request.get("code") else ", once for each config.json"
    log.info("asking transformers about %s (some seconds%s)", _class(request["config"]), once)
    with tempfile.TemporaryDirectory() as scratch:
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([*filter(None, sys.path), str(_ROOT)]),
            "HF_HUB_OFFLINE": "1",
            "HF_MODULES_CACHE": scratch,  # copies of trusted code, which would else stay in the user's cache
            "OMP_NUM_THREADS": "1",
            "CUDA_VISIBLE_DEVICES": "",
        }
        # -P: a torch.py in the current folder is not what is meant
        command = [sys.executable, "-P", "-W", "ignore", "-m", "lazymerge.conversions.meta_model"]
        try:
            done = subprocess.run(
                command,
                input=question.encode(),
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env=environment,
                timeout=_WAIT,
            )
        except subprocess.TimeoutExpired as error:
            raise _beyond_bounds(request["config"]) from error
        except OSError as error:
            raise PlanError(
                f"{sys.executable}: {error.strerror}",
                "merge with --no-check --names runtime, which starts no Python",
            ) from error
    if done.returncode == -signal.SIGXCPU or len(done.stdout) > ANSWER:
        raise _beyond_bounds(request["config"])
    try:
        answer = json.loads(done.stdout)
    except ValueError as error:
        raise PlanError(
            f"building the model of config.json ended with exit code {done.returncode}",
            "see that `python -c 'import transformers'` works here (it takes some 500 MB: ulimit -d, -v), or"
            " merge with --no-check --names runtime",
        ) from error
    if "too large" in answer:
        raise _beyond_bounds(request["config"])
    if "contradicts" in answer:
        raise Contradiction(
            f"config.json contradicts itself: {answer['contradicts']}",
            "mend config.json, or merge with --no-check",
        )
    if "refused" in answer:
        raise InconsistentCheckpoint(
            f"config.json: {_class(request['config'])} does not take it: {answer['refused']}",
            "mend config.json, or merge with --no-check",
        )
    return None if "unknown" in answer else answer


def as_json(request: dict[str, Any]) -> str:
    """The request as JSON; raises `DamagedFile` for a config that is none, or too deep."""
    try:
        return json.dumps(request)
    except (RecursionError, TypeError, ValueError) as error:
        raise DamagedFile(
            f"config.json: {type(error).__name__} {error}", "mend config.json, or merge with --no-check"
        ) from error


def _class(config: Mapping[str, Any]) -> str:
    """The class that the config names first, as far as it names one."""
    names = config.get("architectures")
    return str(names[0]) if isinstance(names, list) and names else "model"


def _beyond_bounds(config: Mapping[str, Any]) -> DamagedFile:
    return DamagedFile(
        f"config.json: building the {_class(config)} that it asks for takes more than"
        f" {SECONDS} s or {MEMORY >> 30} GiB, or has {ANSWER >> 20} MiB of names",
        "mend config.json, or merge with --no-check",
    )
