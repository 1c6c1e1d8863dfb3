"""Coverage-guided fuzzing (atheris) of every door for strangers' bytes: `python -m tests.fuzz DOOR --seconds 600`."""
