"""Attackers as programs: each does one thing to a swarm that runs, and says what it did. They judge nothing."""
