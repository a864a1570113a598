"""Code of the contestants, run in child processes. What they are asked is the same for all."""
