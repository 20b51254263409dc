"""The server process: an asyncio shell around the router, with records, media store, metrics and readiness."""
