"""Servers for the tests and benchmarks of remote checkpoints, each a process of its own.

`s3.serve_s3` serves objects by S3's protocol, by that of Google Cloud Storage, and by plain HTTP; `proxy.serve_proxy`
passes requests on to another server. Both delay each request, count, and misbehave as told (faults.py).
"""
