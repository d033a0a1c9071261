"""For a job's script: import the framework once, then fork the replicas of one run after another.

Not a test. A script calls `serve(main, modules)`; the runs come as lines of JSON, and each is answered with "done".
"""

import importlib
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any


def serve(main: Callable[[dict[str, Any], Path], None], modules: Sequence[str]) -> None:
    """Do runs until no more come; each leaves `codes.json`, of every replica `answer-N.json` and `output-N.txt`."""
    for module in modules:
        importlib.import_module(module)
    for line in sys.stdin:
        run = json.loads(line)
        folder = Path(run["folder"])
        processes = [_fork(main, run, replica, folder) for replica in range(run["num_replicas"])]
        (folder / "codes.json").write_text(json.dumps(_wait(processes, run["timeout"])))
        print("done", flush=True)


def _fork(main: Callable[[dict[str, Any], Path], None], run: dict[str, Any], replica: int, folder: Path) -> int:
    process = os.fork()
    if process:
        return process
    code = 1
    try:
        output = os.open(folder / f"output-{replica}.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(output, 1)
        os.dup2(output, 2)
        place = {"RANK": replica, "LOCAL_RANK": replica, "WORLD_SIZE": run["num_replicas"]}
        os.environ.update({name: str(value) for name, value in place.items()})
        os.environ.update({"LOCAL_WORLD_SIZE": str(run["num_replicas"]), "MASTER_PORT": str(run["port"])})
        os.chdir(run["workdir"])
        main(run["settings"], folder / f"answer-{replica}.json")
        code = 0
    except SystemExit as leaving:
        code = leaving.code if isinstance(leaving.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _wait(processes: list[int], timeout: float) -> list[int]:
    end = time.monotonic() + timeout
    codes: dict[int, int] = {}
    while len(codes) < len(processes):
        for process in processes:
            if process in codes:
                continue
            found, status = os.waitpid(process, os.WNOHANG)
            if found:
                codes[process] = os.waitstatus_to_exitcode(status)
            elif time.monotonic() > end:
                os.kill(process, signal.SIGKILL)
                codes[process] = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) - 1000
        time.sleep(0.01)
    return [codes[process] for process in processes]
