"""The training thread: a replica, the loop around it, checks of others' votes, recovery."""
