"""A peer that starts with the machine: definitions for systemd and launchd, and the supervisor that launchd needs."""
