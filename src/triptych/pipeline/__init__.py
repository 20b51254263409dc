"""Diffusers pipelines as three roles: load one role's weights, cut at the denoise block, run and step."""
