"""Peers as connections: knows no run."""
