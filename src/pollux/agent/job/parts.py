"""The parts of a job, made by `assembly`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from pollux.agent.adaptation.adaptation import Adaptation
from pollux.agent.adaptation.progress import Schedule, TrainingProgress
from pollux.agent.checkpoint.checkpointer import Checkpointer
from pollux.agent.checkpoint.training_state import TrainingState
from pollux.agent.data.loader import Loader
from pollux.agent.distributed.environment import Environment
from pollux.agent.distributed.process_group import ReplicaGroup
from pollux.agent.elastic.member import ElasticMember
from pollux.agent.elastic.step_requests import StepRequests
from pollux.agent.job.rate_agreement import RateAgreement
from pollux.agent.job.script_schedules import ScriptSchedules
from pollux.agent.reporting.receipt import Receipt
from pollux.agent.step.optimizer_step import StepRunner

__all__ = ["JobParts"]


@dataclass(slots=True)
class JobParts:
    """The parts of one job.

    `checkpointer` is None without a checkpoint folder, `schedule` without a learning-rate scheduler to step, `member`
    where no shim runs the replicas; `script_schedules` are the schedulers that the script steps itself. `on_close` is
    called once, when the job is closed.
    """

    replicas: ReplicaGroup
    engine: StepRunner
    loader: Loader
    adaptation: Adaptation
    progress: TrainingProgress
    state: TrainingState
    receipt: Receipt
    requests: StepRequests
    script_schedules: ScriptSchedules
    rates: RateAgreement
    schedule: Schedule | None = None
    checkpointer: Checkpointer | None = None
    member: ElasticMember | None = None
    environment: Environment = field(default_factory=Environment)
    output_dir: Path | None = None
    move_batches: bool = True
    sync_batchnorm: bool = True
    on_close: Callable[[], None] = field(default=lambda: None)
