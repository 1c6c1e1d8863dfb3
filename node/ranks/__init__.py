"""A peer of several ranks: torchrun starts one process for each device, and together they are one peer (FlexDeMo).

    launch    what torchrun says about a process, and the device it computes on
    channel   commands from rank 0 to the others, and what is raised when one is gone
    shard     what every rank holds, and the calls that all ranks make at once: the table of commands
    lead      rank 0: the calls of a replica, each sent to the others and made on all of them
    follow    the other ranks: hear a command, make the call

Rank 0 alone has an identity, a place in the overlay, the log, the text and the disk. ADR 14.
"""
