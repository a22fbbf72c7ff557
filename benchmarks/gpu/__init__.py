"""What to measure on a GPU that is at hand for minutes; see benchmarks/GPU.md."""
