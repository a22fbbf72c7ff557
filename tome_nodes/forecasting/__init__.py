"""Forecasts: in some steps the model does not run, and its answer is extrapolated from two others."""
