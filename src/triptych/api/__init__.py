"""The HTTP door: OpenAI-compatible videos and images over the DiffusionService."""
