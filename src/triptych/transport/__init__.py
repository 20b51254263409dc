"""How bytes move: `control` carries messages over ZMQ, `data` carries tensors; one library a file."""
