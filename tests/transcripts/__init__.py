"""Six rounds of the coordinator's machine, as text that a person reads. `python -m tests.transcripts` writes them again."""
