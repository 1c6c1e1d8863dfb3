"""Whether this machine may and can take part in a run: its person agrees (`consent`), and memory and disk suffice (`fit`)."""
