"""Pruners: which weights become zero. One file each, found by their `PRUNER`."""
