"""What a person at a terminal sees of a peer or of a run. A process of its own draws a peer's view (ADR 35).

`stage` is the peer's side of it: it starts the view, and keeps everything else off the terminal meanwhile. No module here
knows torch.
"""
