"""Runtimes: what the loader and the kernels of each accept. One file each, found by their `TARGET`."""
