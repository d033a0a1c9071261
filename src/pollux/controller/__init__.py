"""Events in, commands out: the one state machine that the simulator and the service both drive."""

from __future__ import annotations

from pollux.controller.machine.controller import Controller
from pollux.controller.machine.reports import model_from
from pollux.controller.machine.settings import ControllerSettings, require
from pollux.controller.messages.commands import Command, Decide, ResizeJob, StartJob, StopJob
from pollux.controller.messages.events import (
    DecisionMade,
    Event,
    GenerationEnded,
    GenerationShrunk,
    JobCancelled,
    JobFinished,
    JobLimitsChanged,
    JobPaused,
    JobRan,
    JobReported,
    JobResumed,
    JobRunning,
    JobsForgotten,
    JobSpec,
    JobSubmitted,
    NodeAdded,
    NodeRemoved,
    NodeSetAside,
    NodeTakenBack,
    QueueChanged,
    TimerFired,
    TimeSkipped,
)
from pollux.controller.messages.job_spec import spec_from
from pollux.controller.state.lifecycle import ENDED, HOLDING, JobState
from pollux.controller.state.records import JobRecord

__all__ = [
    "ENDED",
    "HOLDING",
    "Command",
    "Controller",
    "ControllerSettings",
    "Decide",
    "DecisionMade",
    "Event",
    "GenerationEnded",
    "GenerationShrunk",
    "JobCancelled",
    "JobFinished",
    "JobLimitsChanged",
    "JobPaused",
    "JobRan",
    "JobRecord",
    "JobReported",
    "JobResumed",
    "JobRunning",
    "JobSpec",
    "JobState",
    "JobSubmitted",
    "JobsForgotten",
    "NodeAdded",
    "NodeRemoved",
    "NodeSetAside",
    "NodeTakenBack",
    "QueueChanged",
    "ResizeJob",
    "StartJob",
    "StopJob",
    "TimeSkipped",
    "TimerFired",
    "model_from",
    "require",
    "spec_from",
]
