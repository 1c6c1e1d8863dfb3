"""The replicated state as pieces that peers fetch by hash, and the private state that a peer keeps on its own disk."""
