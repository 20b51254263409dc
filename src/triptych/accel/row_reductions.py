"""Norms over a row of a transformer's width as one-pass kernels.

`torch.compile` keeps rows of up to 1,024 numbers in registers and reads longer ones twice, once to reduce and once to
write; the widths of video and image transformers (1,536 to 5,120) fit as well.
"""

# The compiler's choices are meant to be replaced, but are not declared public.
# pyright: reportPrivateImportUsage=false, reportUnknownMemberType=false

from __future__ import annotations

from typing import Any

from torch._inductor import config
from torch._inductor.choices import InductorChoices
from torch._inductor.runtime.hints import ReductionHint
from torch._inductor.virtualized import V

_WIDEST = 8192
"""Numbers of a row that still fit the registers of a block of threads."""


class RowsInRegisters(InductorChoices):
    """The compiler's own choices but for that."""

    def uuid(self) -> str:
        """Tells graphs kept on disk that were compiled so from others."""
        return f"rows of {_WIDEST} in registers"

    @staticmethod
    def should_use_persistent_reduction(features: Any, cooperative_reduction: bool) -> bool:
        """Whether a reduction keeps what it reduces in registers."""
        if InductorChoices.should_use_persistent_reduction(features, cooperative_reduction):
            return True
        if cooperative_reduction or not config.triton.persistent_reductions:
            return False
        is_inner = features.get_reduction_hint() == ReductionHint.INNER
        return is_inner and V.graph.sizevars.statically_known_leq(features.reduction_numel, _WIDEST)


def keep_rows_in_registers() -> None:
    """Compile so from now on, in the calling thread and in those that have compiled nothing yet."""
    config.inductor_choices_class = RowsInRegisters
    V.set_choices_handler(RowsInRegisters())
