"""A service that lives long, between kills: its memory and files stay flat, and what it knows is what its log says.

`POLLUX_FAULT_EVENTS` sets the number of rounds, `POLLUX_FAULT_SEED` the seed. Each round, eight clients submit, resize,
pause and cancel jobs of a real service with real shims; at its end all have ended, and the process is measured. Some
rounds end with kill -9 and the next service, which must know all that the one before knew.
"""

import os
import random
import signal
import uuid
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from pollux.testing.jobs.replica_server import load_module
from pollux.testing.waiting import PATIENCE_SECONDS, wait_until

KILLS = load_module(str(Path(__file__).with_name("test_service_kills.py")))
ROUNDS = max(4, int(os.environ.get("POLLUX_FAULT_EVENTS", "4")))
SEED = int(os.environ.get("POLLUX_FAULT_SEED", "20224"))
CLIENTS, JOBS_OF_ONE = 8, 1 if ROUNDS < 10 else 3
MORE_FILES = 6
# A job that has ended is kept, with its events, for those who ask; what Python's allocator keeps comes and goes.
MEMORY_BYTES, MEMORY_BYTES_OF_JOB = 16 << 20, 64 << 10


def measured(service):
    """The service's memory in bytes, its open files, and its threads."""
    process = Path(f"/proc/{service.process.pid}")
    pages = int((process / "statm").read_text().split()[1])
    files = len([*(process / "fd").iterdir()])
    return pages * os.sysconf("SC_PAGE_SIZE"), files, len([*(process / "task").iterdir()])


def known(service):
    """What the service tells of each job: how it ended, after how many starts and crashes."""
    _, answer = service.answer("GET", "/v1/jobs?limit=1000")
    names = ("state", "generation", "crashes", "ended_at", "max_gpus")
    return {job["id"]: [job[name] for name in names] for job in answer["jobs"] if job["state"] in KILLS.ENDED}


def use(service, clients, chance, number):
    """What one client does in one round; returns its jobs, each with how it must end."""
    wanted = {}
    for count in range(JOBS_OF_ONE):
        name = f"job-{number}-{count}"
        ends = chance.random() < 0.75
        clients.take(name, clients.job(name, round(chance.uniform(0.0, 0.5), 2) if ends else 3600.0, 1))
        for path, body in chance.sample([("resize", {"gpus": "1..2"}), ("pause", None), ("resume", None)], 2):
            status, answer = service.answer("POST", f"/v1/jobs/{name}/{path}", body)
            assert status in (200, 409), answer
        # Paused last, it would not end.
        assert service.answer("POST", f"/v1/jobs/{name}/resume")[0] in (200, 409)
        if not ends:
            assert service.answer("POST", f"/v1/jobs/{name}/cancel")[0] in (200, 409)
        wanted[name] = "succeeded" if ends else "cancelled"
    return wanted


def test_memory_and_files_stay_flat_and_the_state_is_what_the_log_says(tmp_path):
    chance = random.Random(SEED)
    home, mark = tmp_path / "home", uuid.uuid4().hex
    service = KILLS.Service(home, mark)
    clients = KILLS.Clients(service, tmp_path, SEED)
    wanted = {"training": "succeeded"}
    lives: list[list[tuple[int, int, int, int]]] = [[]]
    service.start(warm=False)
    try:
        clients.take("training", KILLS.train(tmp_path))
        for number in range(ROUNDS):
            with ThreadPoolExecutor(CLIENTS) as pool:
                seeds = [random.Random(chance.random()) for _ in range(CLIENTS)]
                work = [pool.submit(use, service, clients, each, f"{number}-{at}") for at, each in enumerate(seeds)]
                for each in work:
                    wanted |= each.result(PATIENCE_SECONDS)
            ended = KILLS.wait_for_all(service, [*wanted])
            assert ended == wanted, service.log()
            lives[-1].append((len(wanted), *measured(service)))
            if number == ROUNDS // 2 - 1:
                before = known(service)
                service.kill()
                service.start(warm=False)
                assert known(service) == before, "the next service folds the log to something else"
                lives.append([])
        KILLS.check_ledger(home)
        before = known(service)
        assert len(before) == len(wanted)
        service.process.send_signal(signal.SIGTERM)
        assert service.process.wait(PATIENCE_SECONDS) == 0, service.log()
        service.start(warm=False)
        assert known(service) == before
        print(f"jobs, bytes, files and threads after each round, by life: {lives}")
        for life in lives:
            (jobs, memory, files, threads), *later = life
            for more_jobs, more_memory, more_files, more_threads in later:
                allowed = MEMORY_BYTES + MEMORY_BYTES_OF_JOB * (more_jobs - jobs)
                assert more_memory - memory <= allowed, lives
                assert more_files - files <= MORE_FILES, lives
                assert more_threads - threads <= MORE_FILES, lives
        wait_until("no folder of a job", lambda: len([*(home / "run").glob("*/")]) <= MORE_FILES)
    finally:
        for pid in KILLS.processes_with(mark):
            os.kill(pid, signal.SIGKILL)
        if service.process is not None:
            service.process.wait(PATIENCE_SECONDS)
