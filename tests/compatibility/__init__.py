"""Merging beside other nodes, on tiny models of ComfyUI's own classes."""
