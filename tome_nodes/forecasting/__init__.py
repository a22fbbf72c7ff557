"""Forecasts: in some steps the model does not run; its answer is extrapolated from two others."""
