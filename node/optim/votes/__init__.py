"""What a vote is, and the bytes of a payload."""
