"""The least that a cast can cost: every byte read once, as many written as there will be, no work between.

python -m benches.plain SOURCE TARGET --write BYTES [--threads N] [--sync]
"""

from __future__ import annotations

import argparse
import os
import threading
from collections.abc import Iterator
from pathlib import Path

BLOCK = 4 << 20

Step = tuple[int, int, int, int, int]  # descriptor, from, bytes to read, to, bytes to write


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("source", type=Path)
    parser.add_argument("target", type=Path)
    parser.add_argument("--write", type=int, required=True)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--sync", action="store_true")
    options = parser.parse_args()
    target = os.open(options.target, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o644)
    queue, lock = steps(sorted(options.source.glob("*.pt")), options.write), threading.Lock()

    def work() -> None:
        buffer = memoryview(bytearray(BLOCK))
        while True:
            with lock:
                step = next(queue, None)
            if step is None:
                return
            file, at, size, there, out = step
            os.preadv(file, [buffer[:size]], at)
            os.pwrite(target, buffer[:out], there)

    threads = [threading.Thread(target=work) for _ in range(options.threads)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if options.sync:
        os.fsync(target)


def steps(files: list[Path], write: int) -> Iterator[Step]:
    """The files in blocks; the output grows in proportion to what has been read."""
    total = sum(file.stat().st_size for file in files)
    read = written = 0
    for file in files:
        descriptor, size = os.open(file, os.O_RDONLY), file.stat().st_size
        for at in range(0, size, BLOCK):
            count = min(BLOCK, size - at)
            read += count
            upto = write * read // total
            yield descriptor, at, count, written, upto - written
            written = upto


if __name__ == "__main__":
    main()
