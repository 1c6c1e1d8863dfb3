"""What a person types, but for `join`: status, demo, relay, export; and what is asked before a run may use a machine."""
