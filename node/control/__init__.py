"""How the owner steers a running peer: pause, resume, finish, leave, and what the peer tells.

Nothing here knows the trainer, torch or a run: the commands of the owner load in a moment. `node/owner_commands.py` answers.
"""
