"""Trains the small text-to-video model that ships with Triptych: `python -m tools.tiny --out DIR`.

Reading order: `world` (what the clips show), `captions` and `tokens` (how they are told), `models` (the networks),
`vae_training`, `latents` (encoded clips), `dit_training`, `judge` (what the result obeys), `export`, `card`.
"""
