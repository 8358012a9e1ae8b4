"""Pallas Mosaic GPU kernels for Hopper; ``limits`` tells what they can run."""
