"""What the elements of tensors are like, found by going through them piece by piece: statistics, and what differs
between two tensors.

Nothing here knows of views or formats: it takes mappings of lazy tensors, as the writers do.
"""
