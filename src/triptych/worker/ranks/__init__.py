"""The further ranks of an instance of several GPUs: processes that follow rank 0, which owns control and data plane."""
