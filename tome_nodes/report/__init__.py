"""Reports on a sampling run: observers that follow it, texts and pictures."""
