"""What a peer takes of its owner's machine: settings that change while it runs, when it may work, and how much it may take."""
