"""Many random runs in one process: nothing fails, nothing is left behind, memory does not grow."""
