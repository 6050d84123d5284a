"""The step traced whole, compiled, and replayed."""
