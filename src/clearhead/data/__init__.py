"""From files to batches: what training reads.

Start at `batch.py` (the one thing that flows) and `open.py` (a [data] table to datasets). On the way:

    config        the [data] table: which files, which rows, what is asked
    sources       files to texts                      synthetic   tasks that need no file
    tokens        a long row of ids                   shards      the same on disk, larger than memory
    objectives    ids to inputs and targets           packing     documents to rows
    readers       long texts to batches               datasets    what can be asked for a batch by row numbers
    loader        order, ranks, workers, resume       draws       randomness without state
    cmudict       a dictionary of sounds as a table
"""
