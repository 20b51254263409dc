"""Triton kernels, each behind a torch operator with a plain reference that says what it computes."""
