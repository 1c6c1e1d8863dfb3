"""The replicated state as pieces that are fetched by hash, and what a peer keeps on its own disk."""
