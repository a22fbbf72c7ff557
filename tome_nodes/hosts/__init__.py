"""Where merging is attached: one module for each program that runs the models."""
