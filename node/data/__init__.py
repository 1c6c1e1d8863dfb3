"""Text and tokens: where they come from, and which tokens a sample index means. Knows no torch and no wire."""
