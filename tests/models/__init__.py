"""The tiny models of all tests, benchmarks and tools, and tiny checkpoints."""
