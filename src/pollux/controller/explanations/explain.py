"""Turns the code, numbers and jobs of a reason into a sentence and a next step. Recomputes nothing."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from pollux.controller.explanations.forecast import PlanNumbers
from pollux.controller.state.costs import RESTART, medians
from pollux.controller.state.records import JobRecord
from pollux.core import Reason
from pollux.policies.packing.empty_cluster import OTHER_TYPE, WANTED_TYPE

__all__ = ["CODES", "explain", "explain_cost", "explain_lack", "explain_plan", "gpus"]


class _Story:
    """A reason that is being told; remembers which numbers the sentence has mentioned."""

    def __init__(self, reason: Reason, job_id: str) -> None:
        self.numbers, self.jobs, self.job_id = reason.numbers, reason.jobs, job_id
        self.told: set[str] = set()

    def has(self, *names: str) -> bool:
        return all(name in self.numbers for name in names)

    def say(self, name: str) -> str:
        self.told.add(name)
        return _number(self.numbers[name]) if name in self.numbers else "?"

    def get(self, name: str, default: float = 0.0) -> float:
        """The number, for use in a command or comparison; it is not marked as mentioned in the text."""
        return self.numbers.get(name, default)

    def implied(self, value: float, *names: str) -> None:
        """Count these as mentioned if they have the value that a reader expects anyway."""
        self.told |= {name for name in names if self.numbers.get(name) == value}

    def size(self, name: str) -> str:
        """The number as bytes, in the largest fitting unit."""
        self.told.add(name)
        return _size(self.numbers[name])

    def gpus(self, name: str) -> str:
        """The number with the word GPU or GPUs."""
        return f"{self.say(name)} {'GPU' if self.numbers.get(name) == 1 else 'GPUs'}"

    def ratio(self, upper: str, lower: str) -> str:
        """The ratio of two speed-ups; both values if the lower is 0."""
        over, under = self.numbers[upper], self.numbers[lower]
        self.told |= {upper, lower}
        return f"{over / under:.4g}×" if under > 0 else f"{_number(over)} (from {_number(under)})"

    def taken(self, measured: str, assumed: str, name: str) -> str:
        """`measured` for a job that has reported a model, else `assumed`."""
        self.implied(1.0, name)
        return assumed if self.get(name) else measured

    def names(self) -> str:
        return ", ".join(self.jobs)

    def resize(self, least: float, most: float) -> str:
        return f"pollux resize {self.job_id} --gpus {_number(least)}..{_number(max(least, most))}"

    def share(self) -> str:
        """The fair share, the GPUs that the job holds, and its limits."""
        text = ""
        if self.has("fair_gpus", "gpus_after"):
            text = f"; fair share {self.gpus('fair_gpus')}, you hold {self.say('gpus_after')}"
        return text + self.limits()

    def limits(self) -> str:
        """The limits that the user set."""
        if not self.has("min_gpus", "max_gpus"):
            return ""
        return f"; limits {self.say('min_gpus')}..{self.say('max_gpus')}"

    def rest(self) -> str:
        """All numbers that the sentence has not mentioned, by name."""
        left = [
            f"{name.replace('_', ' ')} {_number(self.numbers[name])}" for name in self.numbers if name not in self.told
        ]
        return f" ({', '.join(left)})" if left else ""


_Teller = Callable[[_Story], tuple[str, str]]

# Reasons whose cause is a sentence from outside the controller, kept as the job's detail.
_WITH_DETAIL = ("refused", "fell-back", "left-node")


def explain(reason: Reason | None, job: JobRecord | str) -> tuple[str, str]:
    """What happened to the job and why, and the next command to use; a None reason: no decision about it yet."""
    job_id = job if isinstance(job, str) else job.spec.id
    if reason is None:
        return "waits for the next decision", f"pollux show {job_id}"
    story = _Story(reason, job_id)
    text, next_step = CODES.get(reason.code, _unknown(reason.code))(story)
    told = job.detail if isinstance(job, JobRecord) and reason is job.reason and reason.code in _WITH_DETAIL else ""
    text += _by_rank(story) + _by_lateness(story)
    return text + story.rest() + (f": {told}" if told else ""), next_step


def explain_cost(job: JobRecord) -> str:
    """What a change of its GPUs would cost now; '' if that was never measured. Past decisions did not use this cost."""
    if not job.costs or not job.placement:
        return ""
    how = "live" if job.moves_live else "with a restart"
    text = f"as of now, a change of its GPUs costs it about {job.resize_cost_seconds:.2g} s, {how}"
    if job.moves_live and (restart := medians(job.costs).get(RESTART)) is not None:
        text += f"; with a restart about {restart:.2g} s"
    return text


def explain_plan(plan: PlanNumbers) -> str:
    """The plan of a job that is submitted now, in one sentence."""
    if plan.lack is not None:
        return explain_lack(plan.lack)
    if plan.reason is not None and plan.reason.code == "fits-nowhere":
        return explain_lack(plan.reason)
    span = gpus(plan.high_gpus)
    if plan.low_gpus < plan.high_gpus:
        span = f"{plan.low_gpus} to {span}"
    if plan.starts_now:
        return f"starts now on {gpus(plan.gpus)}; expected to hold {span} while it runs"
    behind = f" behind {', '.join(plan.behind)}" if plan.behind else ""
    return f"waits{behind}; expected to hold {span} once it runs"


def explain_lack(lack: Reason) -> str:
    """What the cluster lacks for a job, in one sentence; `lack` has the code `fits-nowhere`."""
    return explain(lack, "")[0]


def gpus(count: float) -> str:
    """A number with the word GPU or GPUs."""
    return f"{_number(count)} {'GPU' if count == 1 else 'GPUs'}"


def _number(value: float) -> str:
    if not math.isfinite(value):
        return str(value)
    return f"{value:.0f}" if float(value).is_integer() and abs(value) < 1e15 else f"{value:.4g}"


def _size(value: float) -> str:
    """Bytes in the largest unit that gives at least 1."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(value) < 1024 or unit == "TiB":
            break
        value /= 1024
    return f"{_number(value)} {unit}"


def _duration(seconds: float) -> str:
    """Seconds in a unit that is easy to read."""
    for name, size in (("h", 3600.0), ("min", 60.0)):
        if seconds >= 1.5 * size:
            return f"{_number(round(seconds / size, 1) if seconds < 10 * size else round(seconds / size))} {name}"
    return f"{seconds:.0f} s"


def _by_rank(story: _Story) -> str:
    """The order by remaining work, if the policy uses it."""
    if not story.has("left_seconds", "rank"):
        return ""
    story.told |= {"left_seconds", "rank", "other_left_seconds", "left_assumed", "left_doubted"}
    left, other = story.get("left_seconds"), story.get("other_left_seconds", math.inf)
    own = f"{_duration(left)} left"
    if story.get("left_assumed"):
        own = f"an estimated {own}"
    if story.get("left_doubted"):
        return "; goes last: the remaining work that it reports does not shrink while it runs"
    if story.jobs and other < left and not story.has("other_lateness"):
        return f"; {story.jobs[0]} goes first: {_duration(other)} left against {own}"
    return f"; number {story.say('rank')} by the work that is left: {own}"


def _by_lateness(story: _Story) -> str:
    """Whether this job, or the one that gained most, gets GPUs because it has fallen behind its fair share."""
    story.told |= {"lateness", "other_lateness"}
    text = ""
    if story.jobs and story.has("other_lateness"):
        late = _number(round(story.get("other_lateness"), 1))
        text = f"; {story.jobs[0]} goes first: it is expected to take {late} times as long as on its fair share"
    if story.has("lateness"):
        late = _number(round(story.get("lateness"), 1))
        text += f"; it has a right to its fair share: so far it is expected to take {late} times as long as on that"
    return text


# Reasons of policies


def _started(story: _Story) -> tuple[str, str]:
    story.implied(0.0, "gpus_before", "speedup_before")
    return f"started on {story.gpus('gpus_after')}{story.share()}", f"pollux logs -f {story.job_id}"


def _speedup(story: _Story) -> str:
    """How much faster the job is on the larger of two numbers of GPUs."""
    if not story.has("speedup_before", "speedup_after", "gpus_before", "gpus_after"):
        return ""
    after, before = story.say("gpus_after"), story.say("gpus_before")
    told = story.taken("is {}", "is taken as {} until it reports", "speedup_assumed")
    if story.get("gpus_after") > story.get("gpus_before"):
        ratio = story.ratio("speedup_after", "speedup_before")
        return f": your speed-up from {before} to {after} GPUs {told.format(ratio)}"
    ratio = story.ratio("speedup_before", "speedup_after")
    return f": your speed-up from {after} to {before} GPUs {told.format(ratio)}"


def _grew(story: _Story) -> tuple[str, str]:
    text = f"grew {story.say('gpus_before')}→{story.say('gpus_after')}{_speedup(story)}{story.share()}"
    return text, story.resize(story.get("min_gpus", 1.0), story.get("gpus_before"))


def _winner(story: _Story) -> str:
    """The job that gained most, and its gain."""
    if not story.jobs:
        return ""
    first, others = story.jobs[0], story.jobs[1:]
    text = f"; {first} gained"
    if story.has("other_gpus_before", "other_gpus_after"):
        text = f"; {first} went {story.say('other_gpus_before')}→{story.say('other_gpus_after')}"
    if story.has("other_speedup_before", "other_speedup_after"):
        if story.get("other_speedup_before") > 0:
            told = story.taken("makes it {}", "is taken to make it {}", "other_speedup_assumed")
            ratio = story.ratio("other_speedup_after", "other_speedup_before")
            text += f", which {told.format(ratio)} as fast"
        else:
            story.implied(0.0, "other_speedup_before")
            told = story.taken("{}×", "taken as {}×", "other_speedup_assumed")
            text += f", {told.format(story.say('other_speedup_after'))} what its fair share gives"
    return f"{text} (also {', '.join(others)})" if others else text


def _shrank(story: _Story) -> tuple[str, str]:
    text = (
        f"shrunk {story.say('gpus_before')}→{story.say('gpus_after')}{_speedup(story)}{_winner(story)}{story.share()}"
    )
    return text, story.resize(max(story.get("gpus_before"), 1.0), story.get("max_gpus"))


def _moved(story: _Story) -> tuple[str, str]:
    story.implied(story.get("gpus_after"), "gpus_before")
    speed = ""
    if story.has("speedup_before", "speedup_after"):
        told = story.taken(", {}", ", taken as {}", "speedup_assumed")
        speed = f"{told.format(story.ratio('speedup_after', 'speedup_before'))} as fast as where it was"
    return (
        f"moved to other nodes, on {story.gpus('gpus_after')} as before{speed}{story.share()}",
        f"pollux show {story.job_id}",
    )


def _preempted(story: _Story) -> tuple[str, str]:
    story.implied(0.0, "gpus_after")
    text = f"stopped for others: gave up {story.gpus('gpus_before')}, keeps its checkpoints and waits{_winner(story)}"
    if story.has("fair_gpus"):
        text += f"; fair share {story.gpus('fair_gpus')}"
    text += "; a script that saves nothing starts from the beginning"
    return text + story.limits(), _smaller(story)


def _smaller(story: _Story) -> str:
    """The next step of a waiting job: fewer GPUs if possible, else a look at the others."""
    least = story.get("gpus", story.get("min_gpus", 1.0))
    if least > 1:
        return story.resize(1.0, story.get("max_gpus", least))
    return f"pollux show {story.jobs[0]}" if story.jobs else "pollux top"


def _holders(story: _Story) -> str:
    held = f"; most are held by {story.names()}" if story.jobs else ""
    fair = f"; fair share {story.gpus('fair_gpus')}" if story.has("fair_gpus") else ""
    return held + fair + story.limits()


def _waits_for_gpus(story: _Story) -> tuple[str, str]:
    story.implied(0.0, "gpus_before", "gpus_after", "speedup_before")
    needs = (
        f"needs at least {story.gpus('gpus')}, {story.say('free_gpus')} free" if story.has("gpus") else "no GPUs free"
    )
    return f"waits for GPUs: {needs}{_holders(story)}", _smaller(story)


def _no_room(story: _Story) -> tuple[str, str]:
    story.implied(0.0, "gpus_before", "gpus_after", "speedup_before")
    text = (
        f"waits for a place: {story.gpus('free_gpus')} free, but no {story.say('gpus')} of them suit the job together"
    )
    return f"{text} (type, CPUs, memory, nodes){_holders(story)}", _smaller(story)


def _waits_for_quota(story: _Story) -> tuple[str, str]:
    story.implied(0.0, "gpus_before", "gpus_after", "speedup_before")
    left = story.get("quota_left", 0.0)
    text = (
        f"waits for its queue's quota: needs at least {story.gpus('gpus')}, the quota leaves {story.say('quota_left')}"
    )
    return text + _holders(story), story.resize(1.0, left) if left >= 1 else "pollux ls"


def _behind_another(story: _Story) -> tuple[str, str]:
    other = story.names() or "an earlier job"
    step = f"pollux explain {story.jobs[0]}" if story.jobs else "pollux ls"
    return f"waits behind {other}, which came first and waits itself; needs {story.gpus('gpus')}", step


def _fits_nowhere(story: _Story) -> tuple[str, str]:
    story.implied(0.0, "gpus_before", "gpus_after", "speedup_before")
    least, most = story.get("gpus", 1.0), story.get("queue_quota", story.get("suitable_gpus"))
    step = story.resize(1.0, min(most, least - 1.0)) if least > 1 and most >= 1 else f"pollux cancel {story.job_id}"
    if not (story.has("suitable_gpus") or story.has("queue_quota")):
        text = f"cannot start: {story.gpus('gpus')} that suit it would not be there even if the cluster were empty"
        return text, story.resize(1.0, least - 1.0) if least > 1 else step
    return f"cannot start here now: it needs {_lacking(story)}", step


def _lacking(story: _Story) -> str:
    """What the job needs and the cluster has, for the first named of CPUs, memory, quota, nodes and type."""
    if story.has("cpus_per_gpu"):
        largest = story.say("largest_node_cpus") if story.has("largest_node_cpus") else "fewer"
        return f"{story.say('cpus_per_gpu')} CPUs per GPU, and the largest node has {largest}{_room_for(story)}"
    if story.has("memory_bytes_per_gpu"):
        largest = story.size("largest_node_memory_bytes") if story.has("largest_node_memory_bytes") else "less"
        need = story.size("memory_bytes_per_gpu")
        return f"{need} of memory per GPU, and the largest node has {largest}{_room_for(story)}"
    if story.has("queue_quota"):
        return f"{story.gpus('gpus')}, and the quota of its queue is {story.say('queue_quota')}"
    there = _suitable(story)
    if story.has("max_nodes"):
        one = story.get("max_nodes") == 1
        nodes = "1 node" if one else f"{story.say('max_nodes')} nodes"
        largest = "the largest node has" if one else f"the largest {nodes} have"
        story.implied(1.0, "max_nodes")
        return f"{story.gpus('gpus')} on at most {nodes}, and {largest} {story.say('suitable_gpus')}"
    return f"{story.gpus('gpus')}{_types(story, there)}"


def _suitable(story: _Story) -> str:
    """The number of GPUs that suit the job."""
    there = f"there {'is' if story.get('suitable_gpus') == 1 else 'are'} {story.say('suitable_gpus')}"
    return there if story.get("suitable_gpus") else "there are none"


def _room_for(story: _Story) -> str:
    """The number of GPUs with enough CPUs or memory; empty if the job needs one and there is none."""
    if story.get("gpus") == 1 and not story.get("suitable_gpus"):
        story.implied(1.0, "gpus")
        story.implied(0.0, "suitable_gpus")
        return ""
    return f": room for {story.say('suitable_gpus')} of the {story.gpus('gpus')} that it needs"


def _types(story: _Story, there: str) -> str:
    wanted = [name for name in story.numbers if name.startswith(WANTED_TYPE)]
    others = [name for name in story.numbers if name.startswith(OTHER_TYPE)]
    if not wanted:
        return f", and {there}"
    for name in wanted:
        # For a single type, this is the number of suitable GPUs, which the sentence has already.
        story.implied(story.get("suitable_gpus"), name)
    found = ", ".join(f"{story.say(name)} of type {name.removeprefix(OTHER_TYPE)}" for name in others)
    kinds = " or ".join(name.removeprefix(WANTED_TYPE) for name in wanted)
    return f" of type {kinds}, and {there}" + (f" (here: {found})" if found else "")


# Reasons of the controller


def _batch_limit(story: _Story) -> str:
    if not story.has("local_batch_max"):
        return ""
    return f"; from now on at most {story.say('local_batch_max')} samples in the local batch"


def _refused(story: _Story) -> tuple[str, str]:
    times = f"{story.say('refusals')} {'time' if story.get('refusals') == 1 else 'times'} in a row"
    again = f"after a pause of {story.say('backoff_seconds')} s"
    if story.has("gpus_before", "gpus_after"):
        kept = f"goes on with {story.say('gpus_after')} of the {story.gpus('gpus_before')} that it was given"
        return f"{kept}: the others were not available ({times}); asks for more {again}", "pollux top"
    return f"waits: the GPUs that it was given were not available ({times}); asks again {again}", "pollux top"


def _waits_for_job(story: _Story) -> tuple[str, str]:
    step = f"pollux show {story.jobs[0]}" if story.jobs else "pollux ls"
    return f"runs after {story.names()}", step


def _dependency_failed(story: _Story) -> tuple[str, str]:
    step = f"pollux logs {story.jobs[0]}" if story.jobs else "pollux ls"
    return f"failed: it was to run after {story.names()}, which did not succeed", step


def _held(story: _Story) -> str:
    held = story.get("gpus_before", 0.0)
    story.implied(0.0, "gpus_before")
    return f"; it held {story.gpus('gpus_before')}" if held else ""


class _Fields(dict[str, str]):
    """What stands for the names in a template: the job's `id`, or a number."""

    def __init__(self, story: _Story) -> None:
        super().__init__(id=story.job_id)
        self._say = story.say

    def __missing__(self, name: str) -> str:
        return self._say(name)


def _told(text: str, step: str, rest: Callable[[_Story], str] | None = None) -> _Teller:
    """Tells by a template for the sentence, which `rest` ends, and one for the next step."""

    def tell(story: _Story) -> tuple[str, str]:
        fields = _Fields(story)
        return text.format_map(fields) + (rest(story) if rest else ""), step.format_map(fields)

    return tell


def _unknown(code: str) -> _Teller:
    return lambda story: (code + (f", with {story.names()}" if story.jobs else ""), f"pollux show {story.job_id}")


_LOGS, _SHOW = "pollux logs {id}", "pollux show {id}"
_CRASHES = "crash {crashes}, {retries} are forgiven"
_BACKOFF = f"crashed ({_CRASHES}); starts again after a pause of {{backoff_seconds}} s"
_CHANGE, _GOES_ON = "{gpus_before}→{gpus_after}", "goes on with its state in memory"

CODES: Mapping[str, _Teller] = {
    "started": _started,
    "grew": _grew,
    "shrank": _shrank,
    "moved": _moved,
    "preempted": _preempted,
    "waits-for-gpus": _waits_for_gpus,
    "waits-for-quota": _waits_for_quota,
    "no-room": _no_room,
    "behind-another": _behind_another,
    "fits-nowhere": _fits_nowhere,
    "backoff": _told(_BACKOFF, _LOGS),
    "backoff-memory": _told(f"ran out of memory and {_BACKOFF}", _LOGS, _batch_limit),
    "backoff-free-gpus": _told(
        "failed again and again ({crashes} crashes so far), so nobody gives way to it now: it starts on free GPUs, or "
        "as any job in {wait_seconds} s",
        _LOGS,
    ),
    "crashed": _told(f"failed: {_CRASHES}", _LOGS),
    "out-of-memory": _told(f"failed because it ran out of memory: {_CRASHES}", _LOGS, _batch_limit),
    "lost": _told("its replicas were lost {losses} times without progress; it fails at {most_losses}", "pollux doctor"),
    "replicas-lost": _told(f"lost replicas, {_CHANGE}, and {_GOES_ON}", _LOGS),
    "refused": _refused,
    "fell-back": _told(
        "could not be resized live; restarted from its checkpoint on ", _LOGS, lambda story: story.gpus("gpus_before")
    ),
    "left-node": _told(f"left a node that is going away, {_CHANGE}, and {_GOES_ON}", "pollux top"),
    "stopped": _told("its replicas were stopped from outside; starts again", _LOGS, _held),
    "node-lost": _told("a node it ran on is gone; starts again from its last checkpoint", "pollux doctor", _held),
    "paused": _told("paused by its user", "pollux resume {id}", _held),
    "resumed": _told("resumed; waits for the next decision", _SHOW),
    "cancelled": _told("cancelled by its user", _LOGS, _held),
    "time-limit": _told("reached its time limit of {limit_seconds} s, having run for {held_seconds} s", _LOGS),
    "waits-for-job": _waits_for_job,
    "dependency-failed": _dependency_failed,
    "succeeded": _told("done", _SHOW),
    "failed": _told("failed", _LOGS),
}
"""Every code of Pollux's policies and its controller; a code of another policy is printed as it is."""
