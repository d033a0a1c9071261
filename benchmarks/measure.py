"""What every benchmark needs: CPU timing, the machine's name, and one JSON object as the last line."""

from __future__ import annotations

import datetime
import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"


def cpu_ms(call: Callable[[], object], repeats: int) -> float:
    """Median process CPU time of a call in milliseconds, after one call to warm up."""
    call()
    times = []
    for _ in range(repeats):
        began = time.process_time()
        call()
        times.append((time.process_time() - began) * 1e3)
    return statistics.median(times)


def timed(call: Callable[[], object]) -> float:
    """Seconds that a call takes."""
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def hardware() -> str:
    """The processor's name and the number of cores."""
    name = platform.processor() or platform.machine()
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        name = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), name)
    except OSError:
        pass
    return f"{name}, {os.cpu_count()} cores, Python {platform.python_version()}"


def today() -> str:
    """The date, as results have it."""
    return datetime.date.today().isoformat()


def finish(name: str, result: dict[str, Any], quick: bool) -> None:
    """Print the result as the last line; keep that of a full run."""
    result = {**result, "quick": quick, "date": today(), "hardware": hardware()}
    if not quick:
        RESULTS.mkdir(exist_ok=True)
        (RESULTS / f"{name}.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(result), flush=True)


def data_folder() -> Path | None:
    """The published measurements, where they are beside the project."""
    default = Path(__file__).resolve().parents[2] / "shared" / "data" / "osdi21"
    folder = Path(os.environ.get("POLLUX_OSDI21_DATA", default))
    return folder if folder.is_dir() else None
