"""What to tell of a sampling run, in words and in a picture."""

VIEWS = ("merge map", "heat map", "chart")
"""What to draw."""
