"""Measurements of what merging costs and saves. Not part of the published pack."""
