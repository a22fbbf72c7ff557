"""How tokens merge and when, whichever program the model belongs to."""
