"""The common shape of the worker's threads: a queue of jobs, a way to post to control, and a death that is heard."""

from __future__ import annotations

import logging
import threading
from abc import abstractmethod
from collections.abc import Callable
from queue import SimpleQueue
from typing import Generic, TypeVar

import torch

from triptych.errors import Blame, TriptychError
from triptych.worker.jobs import Close, Post, ThreadDied

Job = TypeVar("Job")

log = logging.getLogger(__name__)


class Mailbox:
    """Posts to the control thread. `post` may be called from any thread and from a signal handler."""

    def __init__(self) -> None:
        self._posts: SimpleQueue[Post] = SimpleQueue()
        self._wake: Callable[[], None] | None = None

    def attach(self, wake: Callable[[], None] | None) -> None:
        """Have ``wake`` called after every post from now on; None: nothing."""
        self._wake = wake

    def post(self, post: Post) -> None:
        """Leave ``post`` for control and wake it."""
        self._posts.put(post)
        wake = self._wake
        if wake is not None:
            wake()

    def wait(self) -> Post:
        """The next post, whenever it comes. For the time before the control loop runs."""
        return self._posts.get()

    def take(self) -> list[Post]:
        """All posts that are there now, oldest first."""
        return [self._posts.get_nowait() for _ in range(self._posts.qsize())]


class WorkerThread(threading.Thread, Generic[Job]):
    """A thread that works through jobs until `close`. Any other end of it is fatal to the process.

    Daemonic, so that a computation that cannot be interrupted does not hold up the end of the process.
    """

    def __init__(self, name: str, post: Callable[[Post], None], device: str) -> None:
        super().__init__(name=name, daemon=True)
        self._post = post
        self._device = torch.device(device)
        self._jobs: SimpleQueue[Job | Close] = SimpleQueue()

    def put(self, job: Job) -> None:
        """Give it a job."""
        self._jobs.put(job)

    def close(self) -> None:
        """Let it end after the jobs that it already has."""
        self._jobs.put(Close())

    def run(self) -> None:
        """Work; post `ThreadDied` if that ends in an error. Not called directly."""
        try:
            if self._device.type == "cuda":  # also where it only waits: at another GPU it would take memory there
                torch.cuda.set_device(self._device)
            self.work()
        except TriptychError as error:
            log.critical("the %s thread died: %s", self.name, error.message)
            self._post(ThreadDied(thread=self.name, reason=error.message, mendable=error.blame is Blame.OPERATOR))
        except BaseException as error:
            log.critical("the %s thread died", self.name, exc_info=True)
            self._post(ThreadDied(thread=self.name, reason=f"{type(error).__name__}: {error}"))

    def work(self) -> None:
        """One job after the other; threads with another rhythm override this."""
        while not isinstance(job := self._jobs.get(), Close):
            self.handle(job)
            del job  # the tensors of a job must not outlive it while the thread waits for the next

    @abstractmethod
    def handle(self, job: Job) -> None:
        """Do one job. An exception that leaves it is the death of the thread, so a request's own are caught within."""
