"""The machines: pure state that takes events and a time and returns actions. No sockets, clocks, threads or tensors."""
