"""The coordinator's wire."""
