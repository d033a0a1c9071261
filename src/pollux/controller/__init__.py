"""Events in, commands out: the one state machine that the simulator and the service both drive."""

from __future__ import annotations

from pollux.controller.commands import Command, Decide, ResizeJob, StartJob, StopJob
from pollux.controller.controller import Controller
from pollux.controller.events import (
    DecisionMade,
    Event,
    GenerationEnded,
    GenerationOutcome,
    GenerationShrunk,
    JobCancelled,
    JobFinished,
    JobLimitsChanged,
    JobPaused,
    JobReported,
    JobResumed,
    JobRunning,
    JobsForgotten,
    JobSpec,
    JobSubmitted,
    NodeAdded,
    NodeRemoved,
    QueueChanged,
    TimerFired,
)
from pollux.controller.job_spec import spec_from
from pollux.controller.lifecycle import ENDED, HOLDING, TRANSITIONS, JobState
from pollux.controller.records import JobRecord
from pollux.controller.reports import model_from
from pollux.controller.settings import ControllerSettings, require

__all__ = [
    "ENDED",
    "HOLDING",
    "TRANSITIONS",
    "Command",
    "Controller",
    "ControllerSettings",
    "Decide",
    "DecisionMade",
    "Event",
    "GenerationEnded",
    "GenerationOutcome",
    "GenerationShrunk",
    "JobCancelled",
    "JobFinished",
    "JobLimitsChanged",
    "JobPaused",
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
    "QueueChanged",
    "ResizeJob",
    "StartJob",
    "StopJob",
    "TimerFired",
    "model_from",
    "require",
    "spec_from",
]
