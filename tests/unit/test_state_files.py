"""Files in folders that jobs can write to are opened by `storage.state_file` and `foreign_file`, and by nothing else.

Every other opening in the rooms that run beside jobs is listed here with its number, so that a new one is seen.
"""

import ast
from collections import Counter
from pathlib import Path

SOURCE = Path(__file__).resolve().parents[2] / "src" / "pollux"
LOOKED_AT = ("backends", "service/server", "service/engine", "service/clocks", "service/views", "agent/reporting",
             "agent/checkpoint/oom_notes.py")  # fmt: skip
METHODS = {"read_text", "read_bytes", "write_text", "write_bytes", "open", "touch"}
# Paths of the kernel's, descriptors, and names of folders: nobody can put anything there.
HARMLESS = ("/proc/", "os.devnull", "'/proc", "O_DIRECTORY", "tables", "table", "Popen")
ELSEWHERE = {
    # A certificate and the configuration of a cluster are the operator's; they are read once, at the start.
    "service/server/certificates.py": 1,
    "service/server/serve.py": 1,
    "backends/slurm/commands.py": 1,
    # A folder that the actor has just made, which only it and its host know.
    "backends/ray/node_actor.py": 1,
    # A marker in the folder of a job, by a thread that may hang; a new name, made with O_EXCL.
    "backends/fleet/shared_folders.py": 1,
    # Files of control groups, below a folder of the kernel's.
    "backends/process/cgroup.py": 1,
    # A device of the kernel's, as a path that the function is given.
    "backends/process/proc.py": 1,
    # A forked replica's own streams, by descriptor.
    "backends/process/warm_python.py": 2,
}


def openings(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call):
            called = node.func
            text = ast.unparse(node)
            is_one = (isinstance(called, ast.Name) and called.id == "open") or (
                isinstance(called, ast.Attribute) and called.attr in METHODS and not text.startswith("webbrowser")
            )
            if is_one and not any(word in text for word in HARMLESS):
                yield text


def test_no_file_that_a_job_could_replace_is_opened_any_other_way():
    paths = [
        each
        for part in LOOKED_AT
        for each in ([SOURCE / part] if part[-3:] == ".py" else (SOURCE / part).rglob("*.py"))
    ]
    found = {str(path.relative_to(SOURCE)): [*openings(path)] for path in paths}
    assert len(found) > 100
    assert Counter({name: len(calls) for name, calls in found.items() if calls}) == ELSEWHERE, {
        name: calls for name, calls in found.items() if len(calls) != ELSEWHERE.get(name, 0)
    }
