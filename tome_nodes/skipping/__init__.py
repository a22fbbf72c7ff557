"""Shallow steps: only the outermost blocks of a UNet run; what the others gave is kept."""
