"""The engine of long work: executor, progress, ledger, destinations and publishing."""
