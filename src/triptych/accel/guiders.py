"""Watching a guider of Diffusers: when a step asks for branches of guidance, and when it combines them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from diffusers.guiders.guider_utils import BaseGuidance


class Watcher(Protocol):
    """Who wants to know."""

    def begin(self, branches: Sequence[Any]) -> None:
        """The guider wants these branches; none: a step begins."""
        ...

    def gather(self, branches: Sequence[Any]) -> None:
        """The guider is about to combine the predictions of these branches."""
        ...


class GuiderShare(Protocol):
    """What makes the branches of a request's guidance in another way than one after the other."""

    def guider(self, guider: Any) -> Any:
        """A request's own guider, having its branches made so."""
        ...


class FloatPredictions:
    """Has the predictions of branches combined in float32."""

    def begin(self, branches: Sequence[Any]) -> None:
        """Nothing."""

    def gather(self, branches: Sequence[Any]) -> None:
        """Make float32 of what each branch holds."""
        for branch in branches:
            branch.noise_pred = branch.noise_pred.float()


def changes_model(component: Any) -> bool:
    """Whether this is a guider that changes the model for one of its branches, so that calls which look alike are not,
    and what fails in between leaves the model changed."""
    return isinstance(component, BaseGuidance) and type(component).prepare_models is not BaseGuidance.prepare_models


def watched(guider: Any, watcher: Watcher) -> Any:
    """``guider``, one request's own, telling ``watcher`` of its steps and otherwise as it was."""
    kind: type[Any] = type(guider)

    class Watched(kind):
        def set_state(self, *args: Any, **kwargs: Any) -> Any:
            watcher.begin(())
            return super().set_state(*args, **kwargs)

        def prepare_inputs(self, *args: Any, **kwargs: Any) -> Any:
            branches = super().prepare_inputs(*args, **kwargs)
            watcher.begin(branches)
            return branches

        def prepare_inputs_from_block_state(self, *args: Any, **kwargs: Any) -> Any:
            branches = super().prepare_inputs_from_block_state(*args, **kwargs)
            watcher.begin(branches)
            return branches

        def __call__(self, data: Any) -> Any:
            watcher.gather(data)
            return super().__call__(data)

    Watched.__name__ = kind.__name__
    Watched.__module__ = kind.__module__  # a checkpoint knows the objects of Diffusers by it
    guider.__class__ = Watched
    return guider
