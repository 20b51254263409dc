"""Benchmarks: the control plane with no-op stages, the data plane, and serving load over HTTP."""
