"""Sizes as people write them."""

from __future__ import annotations

import math
import re

from lazymerge.errors import PlanError

_SIZE = re.compile(r"\s*([0-9]*\.?[0-9]+)\s*([kmgt]?)(i?)b?\s*", re.IGNORECASE)


def parse_size(size: float | str) -> int:
    """Bytes of a size as people write it: 123, "5GB" (10^9), "512MiB" (2^20), "1.5 GB".

    Raises `PlanError` for anything else, and for sizes below one byte.
    """
    if isinstance(size, int | float) and not isinstance(size, bool):
        amount = int(size) if math.isfinite(size) else 0
    else:
        match = _SIZE.fullmatch(str(size))
        if match is None:
            raise PlanError(f"{size!r} is not a size", "write it as 16GB, 512MiB or a number of bytes")
        number, unit, binary = match.groups()
        amount = int(float(number) * (1024 if binary else 1000) ** " kmgt".index(unit.lower() or " "))
    if amount < 1:
        raise PlanError(f"{size!r} is less than one byte", "write it as 16GB, 512MiB or a number of bytes")
    return amount


def format_size(nbytes: float) -> str:
    """Bytes for people: "1.23 GB" is 1.23 x 10^9."""
    for unit in ("bytes", "kB", "MB", "GB"):
        if nbytes < 999.5:
            return f"{nbytes:.0f} {unit}" if unit == "bytes" else f"{nbytes:.3g} {unit}"
        nbytes /= 1000
    return f"{nbytes:.3g} TB" if nbytes < 999.5 else f"{nbytes:,.0f} TB"
