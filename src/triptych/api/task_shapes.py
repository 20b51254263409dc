"""What the Task API answers with."""

from __future__ import annotations

from typing import Literal, TypeAlias

from triptych.api.shapes import Shape

TaskState: TypeAlias = Literal["pending", "processing", "completed", "failed", "cancelled"]


class TaskCreated(Shape):
    """A task was accepted."""

    task_id: str
    task_status: TaskState
    save_result_path: str


class TaskStatus(Shape):
    """A task as it is now; times are ISO 8601 in UTC."""

    task_id: str
    status: TaskState
    start_time: str
    """When it began to run, or was accepted while it has not."""
    end_time: str | None
    error: str | None
    error_type: str | None
    save_result_path: str
    """Under the server's output folder; `/v1/files/download/` takes it too. Of several files it is the first's."""


class TaskFiles(Shape):
    """What a task made."""

    task_id: str
    files: list[str]
    """Paths under the server's output folder; `/v1/files/download/` takes each."""


class TaskStopped(Shape):
    """What a cancel did."""

    stop_status: Literal["success", "do_nothing"]
    reason: str


class QueueStatus(Shape):
    """How full the server is."""

    is_processing: bool
    current_task: str | None
    """The one that runs longest."""
    pending_count: int
    active_count: int
    """Pending and processing."""
    queue_size: int
    queue_available: int


class ServiceStatus(Shape):
    """What the server is doing, and what became of the tasks that it remembers."""

    service_status: Literal["idle", "busy"]
    current_task: str | None
    active_tasks: list[str]
    pending_tasks: int
    queue_size: int
    total_tasks: int
    completed_tasks: int
    failed_tasks: int


class ServiceMetadata(Shape):
    """Which model is served; null until an instance has told."""

    model_path: str | None
    model_cls: str | None
    task: str | None
    output: Literal["video", "image"] | None
    version: str
