"""Bytes by hash: the serving side, the asking side, and the order in which a peer asks holders."""
