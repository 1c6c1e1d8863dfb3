"""Peers as connections: knows no run."""

from node.imports import later

later("scipy.optimize")  # before hivemind, which imports it for averages that this package does not use
