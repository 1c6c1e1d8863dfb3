"""A peer of several ranks: torchrun starts one process for each device, and together they are one peer (FlexDeMo).

    launch    torchrun's facts about a process, and the device of a rank.
    channel   commands from rank 0 to the others, and the error when a rank is gone.
    shard     a rank's part of the model and the optimizer, and the table of commands: the calls that all ranks make at once.
    lead      rank 0: the calls of a replica. Rank 0 sends each to the others, and all ranks make it.
    follow    the other ranks: receive a command, make the call.

Rank 0 alone has an identity, a place in the overlay, the log, the text and the disk. ADR 14.
"""
