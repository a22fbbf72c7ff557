"""Plans: which tokens of a picture merge, and how."""
