"""ToMe Tune: which settings to try on the user's model and device, and which to take."""
