"""The role process: threads that pull, compute, stage and encode around one instance machine."""
