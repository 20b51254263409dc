# Triton is untyped, and not there on a machine without a GPU; this module is imported only where it is.
# pyright: basic, reportMissingImports=false
"""Whether Triton can build and run a kernel on this machine: it needs a C compiler and a folder to write to."""

from __future__ import annotations

from functools import cache

import torch


@cache
def trouble(device: torch.device) -> str:
    """Why a small kernel cannot be built and run on a CUDA ``device``; nothing when it was."""
    try:
        from triptych.accel.kernels.rms_rope import rms_rope

        with torch.cuda.device(device):
            x = torch.ones(1, 16, 64, device=device, dtype=torch.bfloat16)
            weight = torch.ones(64, device=device, dtype=torch.bfloat16)
            angle = torch.zeros(16, 16, device=device)
            rms_rope(x, weight, angle.cos(), angle.sin(), 2, 1e-5)
            torch.cuda.synchronize()
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # of Triton, of the C compiler that it calls, or of the driver
        return f"Triton builds no kernels here: {str(error).strip().partition(chr(10))[0] or type(error).__name__}"
    return ""
