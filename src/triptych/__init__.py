"""Triptych serves diffusion pipelines split into encoder, denoiser and decoder processes."""

__version__ = "0.1.0"
