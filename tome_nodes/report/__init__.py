"""What is told of a sampling run: observers that follow it, words and pictures."""
