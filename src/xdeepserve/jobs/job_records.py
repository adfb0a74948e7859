"""What is kept of files, jobs, tasks and events. Times are seconds since 1970."""

from __future__ import annotations

from typing import Any

import msgspec

from xdeepserve.jobs.job_states import JOB_MOVES, JobState, TaskState, is_over


class StoredFile(msgspec.Struct, frozen=True):
    """An uploaded file; its content lies beside the database, under its id."""

    number: int
    name: str
    purpose: str
    num_bytes: int
    created_at: int

    @property
    def id(self) -> str:
        """What clients call it."""
        return f"file-{self.number:08d}"


class TrainingSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """OpenAI's hyperparameters of supervised fine-tuning. The multiplier is of jobs/training.py's rate."""

    n_epochs: int = 1
    batch_size: int = 8
    learning_rate_multiplier: float = 1.0

    @property
    def wrong(self) -> str | None:
        """What lies outside its bounds, if anything."""
        for name, most in (("n_epochs", 50), ("batch_size", 256), ("learning_rate_multiplier", 1000)):
            value = getattr(self, name)
            if not 0 < value <= most:
                return f"{name} must lie in (0, {most}], found {value:g}"
        return None


class AgentOrder(msgspec.Struct, frozen=True):
    """What an agent begins with: messages in OpenAI's shape, and names of tools that it may call."""

    messages: list[dict[str, Any]]
    tools: list[str]
    max_tokens: int  # of a turn
    temperature: float


class JobOrder(msgspec.Struct, frozen=True, kw_only=True):
    """What a client asks for: `algorithm` is a name of quant.method.METHODS.

    model       what clients call the model to be quantised, and `source`: a preset or a checkpoint directory
    training, validation   numbers of files
    """

    model: str
    source: str
    training: int
    validation: int | None = None
    algorithm: str = "smoothquant+gptq"
    samples: int = 64
    suffix: str | None = None
    metadata: dict[str, str] | None = None
    training_settings: TrainingSettings | None = None  # of an order to train, and not to quantise
    agent: AgentOrder | None = None  # of an order for an agent, which makes no model

    @property
    def changed(self) -> str:
        """What its model is, beside the original."""
        return "quantized" if self.training_settings is None else "trained"


class TaskRecord(msgspec.Struct, frozen=True):
    """A step of a job. `attempts` counts how often it was begun."""

    kind: str
    state: TaskState
    attempts: int
    result: dict[str, Any] | None


class JobRecord(msgspec.Struct, frozen=True):
    """A job, with its tasks in their order."""

    number: int
    order: JobOrder
    state: JobState
    created_at: int
    finished_at: int | None
    reason: str | None  # why it failed
    tasks: list[TaskRecord]

    @property
    def id(self) -> str:
        """What clients call it."""
        return f"{'ftjob' if self.order.agent is None else 'agentjob'}-{self.number:08d}"

    @property
    def result_name(self) -> str:
        """What clients will call its model."""
        is_trained = self.order.training_settings is not None
        label = self.order.suffix or ("sft" if is_trained else self.order.algorithm.replace("+", "-"))
        return f"ft:{self.order.model}:{label}:{self.number}"

    @property
    def conversation(self) -> list[dict[str, Any]]:
        """All that an agent was told, has said, and has heard of tools."""
        assert self.order.agent is not None
        results = [task.result["messages"] for task in self.tasks if task.result is not None]
        return [*self.order.agent.messages, *(message for each in results for message in each)]

    @property
    def is_answered(self) -> bool:
        """Whether an agent has called no tool in its last turn: then that was its answer."""
        return any(task.result is not None and task.result.get("is_final") for task in self.tasks)

    @property
    def is_over(self) -> bool:
        """Whether nothing happens to it any more."""
        return is_over(JOB_MOVES, self.state)

    @property
    def next_task(self) -> tuple[int, TaskRecord] | None:
        """The first task that is not done, and its place; None when all are."""
        return next(((i, task) for i, task in enumerate(self.tasks) if task.state != "done"), None)


class JobEvent(msgspec.Struct, frozen=True):
    """Something that has happened to a job."""

    number: int
    created_at: int
    level: str  # info, warn, error
    message: str
    data: dict[str, Any] | None

    @property
    def id(self) -> str:
        """What clients call it."""
        return f"ftevent-{self.number:08d}"
