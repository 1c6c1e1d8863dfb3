"""How the owner steers a running peer: pause, resume, finish, leave, and what the peer does. Knows no torch and no run."""
