"""Events in, commands out: the one state machine that the simulator and the service both drive."""

from __future__ import annotations

from pollux.controller.commands import Command, Decide, ResizeJob, StartJob, StopJob
from pollux.controller.controller import Controller, ControllerSettings, JobRecord, require
from pollux.controller.events import (
    DecisionMade,
    Event,
    JobCancelled,
    JobFinished,
    JobLimitsChanged,
    JobPaused,
    JobReported,
    JobResumed,
    JobRunning,
    JobSpec,
    JobSubmitted,
    NodeAdded,
    NodeRemoved,
    QueueChanged,
)
from pollux.controller.lifecycle import ENDED, HOLDING, TRANSITIONS, JobState

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
    "NodeAdded",
    "NodeRemoved",
    "QueueChanged",
    "ResizeJob",
    "StartJob",
    "StopJob",
    "require",
]
