"""What a person at a terminal sees of a peer, drawn by a process of its own (ADR 35).

`stage` is the peer's side of it: it starts the view, and keeps everything else off the terminal meanwhile. No module here
knows torch.
"""
