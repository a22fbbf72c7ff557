"""Reports on a sampling run: observers that follow it, words and pictures."""
