"""Several GPUs for one denoiser: how they share a step, and what they exchange."""
