"""What a forward did: the operations that its parameters met."""
