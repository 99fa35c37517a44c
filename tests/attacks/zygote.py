"""The process that the attacks run in: it imports lazymerge once, and forks a child for each command.

stdin has one request a line and stdout one answer (tests/attacks/harness.py has what is in them).
"""

from __future__ import annotations

import json
import os
import resource
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any

import lazymerge.cli
from lazymerge import api

TRAPS = {"antigravity", "this", "turtle", "idlelib", "tkinter", "webbrowser", "pty", "lib2to3", "test"}
"""Modules of Python's own that nothing here has a use for: that of an attack is to be seen."""
ALLOWED = {name.partition(".")[0] for name in sys.modules} | {
    "huggingface_hub",
    "lazymerge",
    "ml_dtypes",
    "numpy",
    "packaging",
    "psutil",
    "torch",
    "xxhash",
    "yaml",
    "_yaml",
    "_distutils_hack",
}
"""Packages beside Python's own whose modules may be imported."""
FORBIDDEN = ("/etc/passwd", "/etc/shadow", "/dev/")
HARMLESS = {"/dev/null"}

_STARTS = {
    "os.system",
    "os.posix_spawn",
    "os.fork",
    "os.forkpty",
    "os.exec",
    "os.spawn",
    "os.startfile",
    "pty.spawn",
}
_NETWORK = {
    "socket.connect",
    "socket.bind",
    "socket.sendto",
    "socket.getaddrinfo",
    "socket.gethostbyname",
    "socket.gethostbyaddr",
    "urllib.Request",
    "ftplib.connect",
    "http.client.connect",
    "smtplib.connect",
    "telnetlib.Telnet.open",
}
_CODE = {"pickle.find_class", "ctypes.dlopen", "code.__new__"}
_CHANGES = {  # event -> which of its arguments are paths that change, and which is the folder they are in
    "os.mkdir": (0,),
    "os.rmdir": (0,),
    "os.remove": (0,),
    "os.rename": (0, 1),
    "os.link": (1,),
    "os.symlink": (1,),
    "os.chmod": (0,),
    "os.chown": (0,),
    "os.truncate": (0,),
    "os.utime": (0,),
    "os.setxattr": (0,),
    "shutil.rmtree": (0,),
    "shutil.move": (0, 1),
    "shutil.copyfile": (1,),
}
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


class Watch:
    """An audit hook; `violations` are what may never happen."""

    def __init__(self, writable: Path) -> None:
        self.writable = os.path.realpath(writable)
        self.violations: list[str] = []
        self.processes: list[tuple[list[str], dict[str, str]]] = []
        self._stdlib = sys.stdlib_module_names
        self._torch = False  # a merge that computes imports it, and it much else

    def __call__(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open":
            self._open(*arguments)
        elif event == "import":
            self._import(arguments[0])
        elif event == "subprocess.Popen":
            command = [os.fsdecode(each) for each in arguments[1]]
            self.processes.append((command, dict(arguments[3] or os.environ)))
        elif event in _CHANGES:
            for at in _CHANGES[event]:
                self._write(event, arguments[at])
        elif event in _STARTS or event in _NETWORK or (event in _CODE and not self._torch):
            self.violations.append(f"{event} {arguments!r:.300}")

    def _open(self, path: Any, mode: Any, flags: Any) -> None:
        if isinstance(path, int):
            return
        if isinstance(flags, int) and flags & _WRITES:
            self._write("open for writing", path)
            return
        place = os.path.realpath(os.fsdecode(path))
        if (place.startswith(FORBIDDEN) and place not in HARMLESS) or "/outside/" in place:
            self.violations.append(f"read {place}")

    def _import(self, name: str) -> None:
        root = name.partition(".")[0]
        self._torch |= root == "torch"
        if self._torch:
            return
        if root in TRAPS or (root not in ALLOWED and root not in self._stdlib):
            self.violations.append(f"import {name}")

    def _write(self, event: str, path: Any) -> None:
        if isinstance(path, int) or os.fsdecode(path) in HARMLESS:
            return
        name = os.fsdecode(path)
        if not os.path.isabs(name) and event in {"os.rmdir", "os.remove"} and self._inside_of_rmtree(name):
            return
        place = os.path.join(os.path.realpath(os.path.dirname(name) or "."), os.path.basename(name))
        if place != self.writable and not place.startswith(self.writable + os.sep):
            self.violations.append(f"{event} {place}")

    @staticmethod
    def _inside_of_rmtree(name: str) -> bool:
        """Whether shutil.rmtree, which was itself watched, removes this by the folder's descriptor."""
        frame = sys._getframe(3)
        return frame.f_code.co_name == "_rmtree_safe_fd" and os.sep not in name


def child(request: dict[str, Any], folder: Path) -> int:
    """Run the command; the exit code. Whatever was seen is in `folder` then."""
    for stream, name in ((1, "stdout"), (2, "stderr")):
        os.dup2(os.open(folder / name, os.O_WRONLY | os.O_CREAT), stream)
    os.environ.update(request["environment"])
    tempfile.tempdir = None  # it may be another one now
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CPU, (request["seconds"], request["seconds"]))
    resource.setrlimit(resource.RLIMIT_DATA, (request["memory"], request["memory"]))
    seen = os.open(folder / "seen", os.O_WRONLY | os.O_CREAT)
    watch = Watch(Path(request["writable"]))
    sys.addaudithook(watch)
    code = 1
    try:
        if request["control"] is not None:
            exec(request["control"], {})  # noqa: S102 # the test of this harness
        sys.argv = ["lazymerge", *request["arguments"]]
        lazymerge.cli.main()
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        own = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
        os.write(seen, json.dumps([watch.violations, watch.processes, own]).encode())
    return code


def run(request: dict[str, Any]) -> dict[str, Any]:
    """Fork a child for the request and wait for its end."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                code = child(request, folder)
            finally:
                os._exit(code)
        _, status, usage = os.wait4(pid, 0)
        seen = (folder / "seen").read_text()
        violations, processes, own = json.loads(seen) if seen else ([], [], 0)
        return {
            "code": os.WEXITSTATUS(status) if os.WIFEXITED(status) else None,
            "killed": os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0,
            "seconds": usage.ru_utime + usage.ru_stime,
            "peak": usage.ru_maxrss << 10,
            "own_peak": own,
            "violations": violations,
            "processes": processes,
            "stdout": (folder / "stdout").read_text(errors="replace"),
            "stderr": (folder / "stderr").read_text(errors="replace"),
        }


def main() -> None:
    assert api  # what the command would import first
    for line in sys.stdin:
        print(json.dumps(run(json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
