"""A supervisor for tests of live resizes: it hosts a job's store, starts and ends replicas, and writes the plans.

It takes the place of a backend, and acts only while a test calls it. A `ReplicaServer` forks the replicas, which run a
function of the caller.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support.hosted_store import HostedStore

from pollux.testing.jobs.replica_server import ReplicaResult, ReplicaServer, RunningReplicas
from pollux.testing.waiting import PATIENCE_SECONDS, OutOfTime
from pollux.wire.live import keys
from pollux.wire.live.plan import LOST, RESIZE, GenerationPlan, PlanDeadlines, PlanMember
from pollux.wire.live.store_channel import SECRET_VARIABLE

__all__ = ["LiveReplica", "LiveSupervisor"]

_POLL_SECONDS = 0.005

# As in production, `join` is longer than the time that a replica may spend on a group that cannot form: gloo tries
# several times, each for `regroup` seconds.
_DEADLINES = PlanDeadlines(join=60.0, regroup=4.0)


@dataclass(frozen=True, slots=True)
class LiveReplica:
    """One replica's process."""

    run: RunningReplicas

    @property
    def process(self) -> int:
        """Its process number."""
        return self.run.processes[0]

    @property
    def state(self) -> str:
        """The kernel's letter for the state of the process: T if stopped, X if there is no such process."""
        try:
            return Path(f"/proc/{self.process}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return "X"

    @property
    def is_gone(self) -> bool:
        """Whether it has ended and was waited for."""
        return not Path(f"/proc/{self.process}").exists()

    @property
    def is_over(self) -> bool:
        """Whether it has ended, waited for or not."""
        return self.state in "ZX"


class LiveSupervisor:
    """The generations of one job: `members` are the replicas of the generation `running`, by rank.

    `generation` is the newest number. With `recovers`, a replica that fails is followed by a plan without it; with
    `hang_seconds`, replicas that are silent for longer are killed. `log`: see `HostedStore`.
    """

    def __init__(
        self,
        server: ReplicaServer,
        function: str,
        arguments: Mapping[str, Any] | None = None,
        environment: Mapping[str, str] | None = None,
        recovers: bool = True,
        hang_seconds: float | None = None,
        log: Path | None = None,
    ) -> None:
        import torch.distributed as dist

        from pollux.agent.distributed.authenticated_store import AuthenticatedStore

        self.host = HostedStore(log)
        self.generation = -1
        self.running = -1
        self.members: list[LiveReplica] = []
        self.everybody: list[LiveReplica] = []
        self.events: list[str] = []
        self.pauses: list[dict[str, Any]] = []
        self._client = AuthenticatedStore(self.host.access, PATIENCE_SECONDS)
        self._store = dist.PrefixStore(keys.PREFIX, self._client)
        self._server = server
        self._function = function
        self._arguments = dict(arguments or {})
        self._environment = dict(environment or {})
        self._recovers = recovers
        self._hang_seconds = hang_seconds
        self._looked_at = time.monotonic()
        self._beats: dict[tuple[int, int], tuple[object, float]] = {}
        self._began_at = time.monotonic()
        self.false_alarms = 0

    # Keys

    def _text(self, key: str) -> str | None:
        return self._store.get(key).decode() if self._store.check([key]) else None

    def get(self, key: str) -> Any:
        """The value of a key, read as JSON; None if the key is not set."""
        text = self._text(key)
        return None if text is None or text == "" else json.loads(text)

    def set(self, key: str, value: object) -> None:
        """Set a key to a JSON value."""
        self._store.set(key, json.dumps(value))

    # Replicas

    def _fork(self, rank: int, num_replicas: int, generation: int, joins: bool) -> LiveReplica:
        place = {
            "RANK": rank,
            "LOCAL_RANK": rank,
            "WORLD_SIZE": num_replicas,
            "LOCAL_WORLD_SIZE": num_replicas,
            "POLLUX_GENERATION": generation,
            "POLLUX_STORE": self.host.access.address,
            SECRET_VARIABLE: self.host.access.encode(),
        }
        variables = {name: str(value) for name, value in place.items()}
        variables |= {"POLLUX_JOIN": "1"} if joins else {}
        run = self._server.start(self._function, 1, self._arguments, {**variables, **self._environment})
        replica = LiveReplica(run)
        self.everybody.append(replica)
        return replica

    def start(self, num_replicas: int) -> None:
        """Start a generation of new replicas; all earlier replicas must have ended."""
        self.generation += 1
        self.running = self.generation
        self._began_at = time.monotonic()
        self.members = [self._fork(rank, num_replicas, self.generation, False) for rank in range(num_replicas)]

    def plan(self, keep: Sequence[int], num_joiners: int, why: str = RESIZE, before: int | None = None) -> int:
        """Write the plan of the next generation without committing it; returns its number."""
        self.generation += 1
        before = self.running if before is None else before
        members = tuple(PlanMember(rank, was) for rank, was in enumerate([*keep, *[None] * num_joiners]))
        plan = GenerationPlan(self.generation, before, members, why=why, deadlines=_DEADLINES)
        self._store.set(keys.plan(self.generation), plan.encode())
        return self.generation

    def prepare(self, num_replicas: int, keep: Sequence[int] | None = None) -> list[LiveReplica]:
        """Plan a generation, start its new replicas, and return all its replicas. `keep`: ranks that stay."""
        keep = list(range(min(len(self.members), num_replicas))) if keep is None else list(keep)
        generation = self.plan(keep, num_replicas - len(keep))
        joiners = [self._fork(rank, num_replicas, generation, True) for rank in range(len(keep), num_replicas)]
        return [*(self.members[rank] for rank in keep), *joiners]

    def await_ready(self, replicas: Sequence[LiveReplica]) -> bool:
        """Wait until all new replicas of the planned generation are ready; False if one of them ended instead."""
        ranks = [rank for rank, replica in enumerate(replicas) if replica not in self.members]

        def ready() -> bool | None:
            if any(replicas[rank].is_over for rank in ranks):
                return False
            return self._store.check([keys.ready(self.generation, rank) for rank in ranks]) or None

        return bool(self._until(ready, "joiners are ready"))

    def commit(self, replicas: Sequence[LiveReplica]) -> None:
        """Let all replicas go to the planned generation."""
        self.members = list(replicas)
        self.running = self.generation
        self._began_at = time.monotonic()
        self._store.set(keys.COMMITTED, str(self.generation))

    def withdraw(self, replicas: Sequence[LiveReplica], why: str) -> None:
        """Withdraw the planned generation; its new replicas end."""
        self._store.set(keys.withdrawn(self.generation), why)
        for replica in replicas:
            if replica not in self.members:
                self._until(lambda replica=replica: replica.is_over or None, "a joiner ends")  # type: ignore[misc]

    def resize(self, num_replicas: int, keep: Sequence[int] | None = None) -> str:
        """Change the number of replicas; returns the outcome: "done", "recovered" or why the change failed."""
        replicas = self.prepare(num_replicas, keep)
        if not self.await_ready(replicas):
            self.withdraw(replicas, "a joiner died")
            return "withdrawn"
        self.commit(replicas)
        return self.await_change()

    def await_change(self) -> str:
        """Wait until the newest generation has taken its first step, or has failed."""
        first = self.generation

        def settled() -> str | None:
            self.replace_lost()
            failed = self._text(keys.failed(self.generation))
            if failed is not None:
                return f"failed: {failed}"
            if not self.members:
                return "failed: nobody is left"
            reports = [self.get(keys.done(self.generation, rank)) for rank in range(len(self.members))]
            if any(report is None for report in reports):
                return "ended" if all(member.is_over for member in self.members) else None
            self.pauses.append(
                {**max(reports, key=lambda report: report["pause_seconds"]), "generation": self.generation}
            )
            return "done" if self.generation == first else "recovered"

        return str(self._until(settled, "the generation is there"))

    def replace_lost(self) -> None:
        """Kill replicas that hang; if replicas are dead, commit a plan without them."""
        self._end_hung()
        dead = [rank for rank, member in enumerate(self.members) if member.is_over and not self._ended_well(member)]
        if not dead or not self._recovers:
            return
        alive = [rank for rank in range(len(self.members)) if rank not in dead]
        before = self.running
        self.events.append(f"lost {dead} of generation {before}")
        for rank in dead:
            # Children of a replica, such as data workers, hold its sockets open.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.members[rank].process, signal.SIGKILL)
        self.set(keys.lost(before), dead)
        survivors = [self.members[rank] for rank in alive]
        if survivors:
            self.plan(alive, 0, why=LOST, before=before)
            self.commit(survivors)
        else:
            self.members = []

    def _end_hung(self) -> None:
        """Kill replicas without a heartbeat for `hang_seconds`; counts a false alarm for each that was not stopped."""
        now = time.monotonic()
        if self._hang_seconds is None or now - self._looked_at < 0.2:
            return
        # What this process could not look at itself was no silence of theirs.
        self._began_at = min(now, self._began_at + max(0.0, now - self._looked_at - 1.0))
        self._looked_at = now
        for rank, member in enumerate(self.members):
            beat = self.get(keys.beat(self.running, rank))
            seen, heard = self._beats.get((self.running, rank), (None, 0.0))
            if beat != seen:
                heard = now
                self._beats[self.running, rank] = beat, now
            last = max(self._began_at, heard)
            if now - last > self._hang_seconds and not member.is_over:
                self.events.append(f"rank {rank} of generation {self.running} was silent: {beat}")
                self.false_alarms += member.state != "T"
                self.kill(rank)

    def _ended_well(self, member: LiveReplica) -> bool:
        return (member.run.folder / "result-0.json").exists() and not self._error(member)

    def _error(self, member: LiveReplica) -> str:
        with contextlib.suppress(OSError, ValueError):
            return str(json.loads((member.run.folder / "result-0.json").read_text()).get("error", ""))
        return ""

    def kill(self, rank: int, number: int = signal.SIGKILL) -> None:
        """Send a signal to one replica."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.members[rank].process, number)

    def step(self) -> int:
        """The last step in the heartbeats of the newest generation; -1 before the first."""
        beats = [self.get(keys.beat(self.generation, rank)) for rank in range(len(self.members))]
        return max((int(beat["step"]) for beat in beats if beat is not None), default=-1)

    def wait(self, timeout: float = PATIENCE_SECONDS) -> list[ReplicaResult]:
        """Replace lost replicas until all have ended; the results of the newest generation, by rank."""

        def over() -> bool | None:
            self.replace_lost()
            return all(replica.is_over for replica in self.everybody) or None

        with contextlib.suppress(AssertionError):
            self._until(over, "the job ends", timeout)
        return [member.run.wait(0.0)[0] for member in self.members]

    def close(self) -> list[int]:
        """Kill the replicas that still run, and close the store; returns their exit codes."""
        codes = []
        for replica in self.everybody:
            if Path(f"/proc/{replica.process}").exists():
                codes.append(replica.run.wait(0.0)[0].exit_code)
        self._client.close()
        self.host.close()
        return codes

    def _until(self, look: Callable[[], Any], what: str, timeout: float = PATIENCE_SECONDS) -> Any:
        end = time.monotonic() + timeout
        while True:
            seen = look()
            if seen is not None:
                return seen
            if time.monotonic() > end:
                raise OutOfTime(f"waited {timeout:g} s in vain: {what}\n{self.outputs()}")
            time.sleep(_POLL_SECONDS)

    def outputs(self) -> str:
        """Events and the output of all replicas, for messages."""
        texts = []
        for number, replica in enumerate(self.everybody):
            path = replica.run.folder / "output-0.txt"
            text = path.read_text(errors="replace")[-3000:] if path.exists() else ""
            texts.append(f"replica started as number {number}, over: {replica.is_over}\n{text}")
        return "\n".join([*self.events, *texts])
