"""Components as one request sees them: shallow copies that share weights and differ in what their methods do.

Nothing that two requests share is ever changed: a shadow carries its replaced methods itself, so runs may interleave.
"""

from __future__ import annotations

import copy
import functools
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch

RECORDED = (
    "forward", "encode", "generate", "get_text_features", "get_image_features", "get_image_tokens", "encode_text",
    "encode_image",
)  # fmt: skip
"""Methods through which pipelines let text, image and VAE encoders compute."""

_HOOKS = ("_forward_hooks", "_forward_pre_hooks")


def shadow(module: torch.nn.Module) -> Any:
    """A copy of ``module`` with its weights but methods of its own. Its hooks run in the module, not twice."""
    made: Any = type(module).__new__(type(module))
    made.__dict__.update(module.__dict__)
    made.__dict__.update({name: OrderedDict() for name in _HOOKS})
    made.__dict__["_compiled_call_impl"] = None
    return made


def replaced(made: Any, module: Any, method: str, does: Callable[..., Any]) -> None:
    """Let ``made.method`` do something else. Pipelines inspect signatures, so the replacement shows the original's."""
    made.__dict__[method] = functools.wraps(getattr(module, method))(does)


def encoder_shadow(
    module: torch.nn.Module, path: str, wrap: Callable[[str, Callable[..., Any]], Any], *, depth: int
) -> Any:
    """A shadow whose computing methods, and those of its parts down to ``depth`` levels, go through ``wrap``.

    ``wrap(key, method)`` gives what runs instead; ``key`` is the dotted path. Some pipelines call a text encoder's
    inner model or its last norm.
    """
    made = shadow(module)
    for method in RECORDED:
        if callable(getattr(module, method, None)):
            real = module if method == "forward" else getattr(module, method)
            replaced(made, module, method, wrap(f"{path}.{method}", real))
    made.__dict__["_modules"] = {
        name: child
        if child is None or depth == 0 or isinstance(child, (torch.nn.ModuleList, torch.nn.Sequential))
        else encoder_shadow(child, f"{path}.{name}", wrap, depth=depth - 1)
        for name, child in module._modules.items()  # pyright: ignore[reportPrivateUsage]
    }
    return made


def placed(module: torch.nn.Module, device: torch.device) -> torch.nn.Module:
    """``module``, whose tensors have no memory, so that it says to live on ``device`` and to have been cast when asked.

    Pipelines put what they make where a component is; a stand-in must not draw them to the meta device.
    """
    kind: Any = type(module)
    module.__class__ = type(
        kind.__name__, (_Placed, kind), {"device": property(lambda _: device), "__module__": kind.__module__}
    )
    return module


class _Placed(torch.nn.Module):
    def to(self, *args: Any, **kwargs: Any) -> Any:
        """Cast this shadow alone; there is nothing to move."""
        _, dtype, *_ = torch._C._nn._parse_to(*args, **kwargs)  # pyright: ignore
        if dtype is not None:
            private = copy.deepcopy(self)
            torch.nn.Module.to(private, dtype=dtype)
            for name in ("_parameters", "_buffers", "_modules"):
                self.__dict__[name] = private.__dict__[name]
        return self
