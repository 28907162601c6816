"""Another parallel layout of a checkpoint, by placement: the ways back of what the readers do.

`ranks`: degrees, and which rank is meant. `rules`: where a tensor's merge rule comes from. `cuts`: a merge rule run
backwards. `stored`: what stored shards tell. `names`: which pipeline stage and which expert-parallel rank has a tensor,
under which name. `shard`: all of it on an index, and back.
"""
