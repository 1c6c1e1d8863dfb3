"""Bytes by hash: who serves them, who is asked, and in which order."""
