"""The peer: trains, votes, exchanges and applies. See docs/architecture.md."""
