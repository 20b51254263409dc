"""The control plane: ZMQ sockets of the server and of an instance. Imports no torch."""
