"""Which of a pipeline's models denoise, told by what Diffusers' pipelines call them."""

from __future__ import annotations

from typing import Final

DENOISERS: Final = ("transformer", "unet")
"""What their names begin with; a second one has a number behind."""


def denoises(name: str) -> bool:
    """Whether the component of that name is a model that denoises."""
    return name.startswith(DENOISERS)
