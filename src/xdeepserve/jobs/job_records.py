"""Records of files, jobs, tasks and events. Times are seconds since 1970."""

from __future__ import annotations

from typing import Any

import msgspec

from xdeepserve.jobs.job_states import JOB_MOVES, JobState, TaskState, is_over


class StoredFile(msgspec.Struct, frozen=True):
    """An uploaded file. The content lies beside the database, under the file's id."""

    number: int
    name: str
    purpose: str
    num_bytes: int
    created_at: int

    @property
    def id(self) -> str:
        """Name of the file for clients."""
        return f"file-{self.number:08d}"


class TrainingSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """OpenAI's hyperparameters of supervised fine-tuning.

    The multiplier is of the rate in jobs/training.py.
    """

    n_epochs: int = 1
    batch_size: int = 8
    learning_rate_multiplier: float = 1.0

    @property
    def wrong(self) -> str | None:
        """Name of a setting outside of its bounds, in a message; None if all are inside."""
        for name, most in (("n_epochs", 50), ("batch_size", 256), ("learning_rate_multiplier", 1000)):
            value = getattr(self, name)
            if not 0 < value <= most:
                return f"{name} must lie in (0, {most}], found {value:g}"
        return None


class AgentOrder(msgspec.Struct, frozen=True):
    """Start of an agent: messages in OpenAI's format, and names of the tools that it may call."""

    messages: list[dict[str, Any]]
    tools: list[str]
    max_tokens: int  # of a turn
    temperature: float


class JobOrder(msgspec.Struct, frozen=True, kw_only=True):
    """An order of a client: what a job has to do. `algorithm` is a name of quant.method.METHODS.

    model       the model to be changed, by its name for clients; `source`: a preset or a checkpoint directory
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
        """How the ordered model differs from the original: "quantized" or "trained"."""
        return "quantized" if self.training_settings is None else "trained"


class TaskRecord(msgspec.Struct, frozen=True):
    """A task: a step of a job. `attempts` counts how often it was begun."""

    kind: str
    state: TaskState
    attempts: int
    result: dict[str, Any] | None


class JobRecord(msgspec.Struct, frozen=True):
    """A job with all tasks, in order."""

    number: int
    order: JobOrder
    state: JobState
    created_at: int
    finished_at: int | None
    reason: str | None  # why it failed
    tasks: list[TaskRecord]

    @property
    def id(self) -> str:
        """Name of the job for clients."""
        return f"{'ftjob' if self.order.agent is None else 'agentjob'}-{self.number:08d}"

    @property
    def result_name(self) -> str:
        """Name of the job's model for clients."""
        is_trained = self.order.training_settings is not None
        label = self.order.suffix or ("sft" if is_trained else self.order.algorithm.replace("+", "-"))
        return f"ft:{self.order.model}:{label}:{self.number}"

    @property
    def conversation(self) -> list[dict[str, Any]]:
        """Messages of an agent's conversation so far: its input, its answers, and results of tools."""
        assert self.order.agent is not None
        results = [task.result["messages"] for task in self.tasks if task.result is not None]
        return [*self.order.agent.messages, *(message for each in results for message in each)]

    @property
    def is_answered(self) -> bool:
        """Whether an agent has called no tool in its last turn, which makes that turn the final answer."""
        return any(task.result is not None and task.result.get("is_final") for task in self.tasks)

    @property
    def is_over(self) -> bool:
        """Whether the job is in a final state."""
        return is_over(JOB_MOVES, self.state)

    @property
    def next_task(self) -> tuple[int, TaskRecord] | None:
        """The first unfinished task, with its place; None when all are done."""
        return next(((i, task) for i, task in enumerate(self.tasks) if task.state != "done"), None)


class JobEvent(msgspec.Struct, frozen=True):
    """An event in the life of a job."""

    number: int
    created_at: int
    level: str  # info, warn, error
    message: str
    data: dict[str, Any] | None

    @property
    def id(self) -> str:
        """Name of the event for clients."""
        return f"ftevent-{self.number:08d}"
