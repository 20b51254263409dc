"""What crosses process boundaries: messages, manifests and plain values, as a closed union in MessagePack."""
