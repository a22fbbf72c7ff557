"""ToMe Tune: tries settings on the user's own model."""
