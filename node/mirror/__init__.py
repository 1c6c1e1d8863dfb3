"""Agreed snapshots in places that are no peers: an anchor writes them there, and joining peers read them. ADR 30."""
