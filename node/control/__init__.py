"""How the owner steers a running peer: pause, resume, finish, leave, and what the peer tells.

Only `commands.py` knows the trainer; the rest knows no torch and no run: the commands of the owner load it in a moment.
"""
